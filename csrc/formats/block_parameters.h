// What the arithmetic needs to know of a block format, derived once from its row and the options chosen.
//
// The names follow src/quark/formats/spec.py and block.py, which is the readable statement of the same arithmetic.
#pragma once

#include <cstdint>

namespace quark {

struct ElementRow {
  const char* name;
  int mantissa_bits;
  int min_exponent;
  int max_exponent;
  float lowest;
  float highest;
};

enum class ScaleRule : int32_t { kFloor = 0, kCeil = 1, kEven = 2, kRceil = 3, kMse = 4 };
enum class Rounding : int32_t { kHalfAway = 0, kHalfUp = 1, kHalfEven = 2 };
enum class NonFinite : int32_t { kBlockNan = 0, kPassthrough = 1 };

// Plain data with a fixed layout: Python fills the same structure through ctypes.
struct BlockParameters {
  int64_t block_size;
  int32_t sub_block_size;  // 0: no sub-blocks
  int32_t max_shift;
  int32_t mantissa_bits;
  int32_t min_exponent;
  int32_t max_exponent;
  float lowest;
  float highest;
  int32_t flush_subnormals;
  int32_t carry;
  int32_t round_to_bfloat16;  // before anything else
  ScaleRule scale_rule;
  Rounding rounding;
  NonFinite nonfinite;
  // Scales that are numbers of a small float, times one number for the tensor; all 0 where they are powers of two.
  int32_t scale_mantissa_bits;
  int32_t scale_min_exponent;
  float scale_highest;
  float tensor_scale;  // negative: to be found from the tensor
};

inline bool has_float_scale(const BlockParameters& p) { return p.scale_highest > 0.0f; }

// The largest magnitude of a tensor over this is its scale; the product has few bits and is exact.
inline float tensor_scale_divisor(const BlockParameters& p) { return p.highest * p.scale_highest; }

// The scales that rule `mse` tries, as multiples of the usual one; SCALE_FACTORS of block.py.
constexpr float kScaleFactors[] = {0.75f, 0.8125f, 0.875f, 0.9375f, 1.0f, 1.125f, 1.25f, 1.375f, 1.5f, 2.0f};

// The tensor as (outer, n, inner) with blocks along n.
struct Geometry {
  int64_t outer;
  int64_t n;
  int64_t inner;
};

// Within these limits no shift, sum or product of the arithmetic leaves its type.
inline bool are_in_range(const BlockParameters& p) {
  const bool has_room = p.max_exponent + 25 - p.mantissa_bits <= 127;
  const bool is_plain = p.sub_block_size == 0 && !p.carry && !p.flush_subnormals && !p.round_to_bfloat16;
  const bool has_usual_rule = p.scale_rule == ScaleRule::kFloor || p.scale_rule == ScaleRule::kMse;
  const bool has_scale_bits = p.scale_mantissa_bits >= 0 && p.scale_mantissa_bits <= 7 && p.scale_min_exponent >= -100;
  const bool has_tensor_scale = p.tensor_scale * p.scale_highest <= 3.402823466e38f;  // false for NaN and Inf
  if (has_float_scale(p) && !(is_plain && has_usual_rule && has_scale_bits && has_tensor_scale)) return false;
  return p.block_size >= 1 && p.sub_block_size >= 0 && p.max_shift >= 0 && p.max_shift <= 15 && p.mantissa_bits >= 0 &&
         p.mantissa_bits <= 20 && p.min_exponent >= -126 && p.min_exponent <= p.max_exponent && p.max_exponent >= 0 &&
         has_room;
}

inline bool is_uniform(const BlockParameters& p) { return p.min_exponent == p.max_exponent; }

// What the scale rule adds to the bits of amax before the mantissa is cut off.
inline int32_t exponent_increment(const BlockParameters& p) {
  constexpr int32_t kOne = 1 << 23;
  if (p.scale_rule == ScaleRule::kCeil) return kOne - 1;
  if (p.scale_rule == ScaleRule::kEven) return kOne >> (p.mantissa_bits + 1);
  if (p.scale_rule == ScaleRule::kRceil) {
    float significand = p.highest;
    for (int e = 0; e < p.max_exponent; ++e) significand *= 0.5f;
    for (int e = 0; e > p.max_exponent; --e) significand *= 2.0f;
    return kOne - 1 - static_cast<int32_t>((significand - 1.0f) * kOne);
  }
  return 0;
}

}  // namespace quark
