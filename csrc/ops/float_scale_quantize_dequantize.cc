#include "float_scale_quantize_dequantize.h"

#include "../formats/format_table.h"

namespace quark {

BlockOperator FloatScaleQuantizeDequantize::read(const Attributes& attributes) {
  BlockOperator op{};
  op.node = attributes.node();
  op.axis = attributes.integer("axis", 1, INT64_MIN, INT64_MAX);
  BlockParameters& p = op.parameters;
  read_element(attributes, "fp4_e2m1", p);
  // integers have no exponent, and a scale needs its range
  std::vector<const char*> floats;
  std::vector<const ElementRow*> rows;
  size_t usual = 0;
  for (const ElementRow& row : kMxElements) {
    if (row.min_exponent == row.max_exponent) continue;
    if (std::strcmp(row.name, "fp8_e4m3") == 0) usual = rows.size();
    floats.push_back(row.name);
    rows.push_back(&row);
  }
  const ElementRow& scale = *rows[attributes.choice("scale_dtype", usual, floats)];
  p.scale_mantissa_bits = scale.mantissa_bits;
  p.scale_min_exponent = scale.min_exponent;
  p.scale_highest = scale.highest;
  p.block_size = attributes.integer("block_size", 16, 1, INT64_MAX);
  p.scale_rule = attributes.choice("scale_rule", 0, {"floor", "mse"}) == 1 ? ScaleRule::kMse : ScaleRule::kFloor;
  p.rounding = read_rounding(attributes, Rounding::kHalfEven);
  p.nonfinite = read_nonfinite(attributes, NonFinite::kBlockNan);
  return op;
}

}  // namespace quark
