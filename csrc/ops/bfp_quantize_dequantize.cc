#include "bfp_quantize_dequantize.h"

namespace quark {
namespace {

constexpr int64_t kSharedBits = 9;  // of bit_width: one sign, eight of the exponent
constexpr int64_t kNarrowest = kSharedBits + 1;
constexpr int64_t kWidest = kSharedBits + 21;  // beyond, float32 could not round by addition

// An integer of `magnitude_bits` and a sign, 1.0 its largest power of two; the lowest code only in two's complement.
void set_integer_element(BlockParameters& p, int magnitude_bits, bool twos_complement) {
  const float unit = 1.0f / static_cast<float>(int32_t{1} << (magnitude_bits - 1));
  p.mantissa_bits = magnitude_bits - 1;
  p.min_exponent = 0;
  p.max_exponent = 0;
  p.highest = 2.0f - unit;
  p.lowest = twos_complement ? -2.0f : -p.highest;
}

}  // namespace

BlockOperator BFPQuantizeDequantize::read(const Attributes& attributes) {
  BlockOperator op{};
  op.node = attributes.node();
  op.axis = attributes.integer("axis", 1, INT64_MIN, INT64_MAX);
  BlockParameters& p = op.parameters;
  const bool is_prime = attributes.choice("bfp_method", 0, {"to_bfp", "to_bfp_prime", "to_bfp_prime_shared"}) > 0;
  const bool carries = attributes.integer("use_compiler_version_cpu_kernel", 0, 0, 1) == 1 && !is_prime;
  const int64_t sub_block_size = attributes.integer("sub_block_size", 2, 1, INT64_MAX);
  const int64_t shift_bits = attributes.integer("sub_block_shift_bits", 1, 0, 4);
  const int64_t bit_width = attributes.integer("bit_width", 16, kNarrowest, kWidest);
  set_integer_element(p, static_cast<int>(bit_width - kSharedBits), carries);
  p.block_size = attributes.integer("block_size", 8, 1, INT64_MAX);
  p.sub_block_size = is_prime ? static_cast<int32_t>(sub_block_size) : 0;
  p.max_shift = is_prime ? (1 << shift_bits) - 1 : 0;
  p.flush_subnormals = is_prime;
  p.carry = carries;
  p.round_to_bfloat16 = static_cast<int32_t>(attributes.integer("convert_to_bfloat_before_bfp", 0, 0, 1));
  if (is_prime && (p.block_size % sub_block_size != 0 || sub_block_size > INT32_MAX)) {
    throw BadNode(op.node + ": attribute 'sub_block_size' is " + std::to_string(sub_block_size) +
                  "; expected a divisor of block_size, which is " + std::to_string(p.block_size) + ", of at most " +
                  std::to_string(INT32_MAX));
  }
  p.scale_rule = read_scale_rule(attributes);
  p.rounding = read_rounding(attributes);
  p.nonfinite = read_nonfinite(attributes, is_prime ? NonFinite::kBlockNan : NonFinite::kPassthrough);
  if (carries && p.scale_rule != ScaleRule::kFloor) {
    throw BadNode(op.node +
                  ": attribute 'scale_rule' must be 'floor' with use_compiler_version_cpu_kernel = 1, which "
                  "raises exponents by its own rule");
  }
  return op;
}

}  // namespace quark
