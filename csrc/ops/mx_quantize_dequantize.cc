#include "mx_quantize_dequantize.h"

#include "../formats/format_table.h"

namespace quark {

BlockOperator MXQuantizeDequantize::read(const Attributes& attributes) {
  BlockOperator op{};
  op.node = attributes.node();
  op.axis = attributes.integer("axis", 1, INT64_MIN, INT64_MAX);
  BlockParameters& p = op.parameters;
  const size_t row = attributes.choice("element_dtype", mx_element_index("int8"), mx_element_names());
  const ElementRow& element = kMxElements[row];
  p.block_size = attributes.integer("block_size", 32, 1, INT64_MAX);
  p.mantissa_bits = element.mantissa_bits;
  p.min_exponent = element.min_exponent;
  p.max_exponent = element.max_exponent;
  p.lowest = element.lowest;
  p.highest = element.highest;
  p.scale_rule = read_scale_rule(attributes);
  p.rounding = read_rounding(attributes);
  p.nonfinite = read_nonfinite(attributes, NonFinite::kBlockNan);
  return op;
}

}  // namespace quark
