#include "mx_quantize_dequantize.h"

namespace quark {

BlockOperator MXQuantizeDequantize::read(const Attributes& attributes) {
  BlockOperator op{};
  op.node = attributes.node();
  op.axis = attributes.integer("axis", 1, INT64_MIN, INT64_MAX);
  BlockParameters& p = op.parameters;
  read_element(attributes, "int8", p);
  p.block_size = attributes.integer("block_size", 32, 1, INT64_MAX);
  p.scale_rule = read_scale_rule(attributes);
  p.rounding = read_rounding(attributes);
  p.nonfinite = read_nonfinite(attributes, NonFinite::kBlockNan);
  return op;
}

}  // namespace quark
