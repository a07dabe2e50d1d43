#include "extended_dequantize_linear.h"

namespace quark {
namespace {

template <class Q, class Y>
void dequantize(const Call& call, const LinearInputs& inputs) {
  const Tensor out = call.output(inputs.x.shape, inputs.scale.type);
  const Q* q = static_cast<const Q*>(inputs.x.data);
  Y* y = static_cast<Y*>(out.data);
  for_each_run(call, inputs, [&](int64_t begin, int64_t end, int64_t channel) {
    LinearQuantizer<Q> quantizer;
    quantizer.scale = scale_at(inputs.scale, channel);
    quantizer.zero_point = static_cast<const Q*>(inputs.zero_point.data)[channel];
    for (int64_t i = begin; i < end; ++i) from_float(quantizer.load(q[i]), y + i);
  });
}

}  // namespace

template <ort::ElementType kFloatType>
void ExtendedDequantizeLinear<kFloatType>::compute(const Call& call) const {
  typedef std::conditional_t<kFloatType == ort::kFloat, float, Half> Y;
  const LinearInputs inputs = read_linear_inputs(call, axis, node);
  if (inputs.x.type != inputs.zero_point.type) throw BadNode(node + ": x and the zero point must have one type");
  const bool is_known = with_quantized_type(inputs.x.type, [&](auto* tag) {
    dequantize<std::remove_pointer_t<decltype(tag)>, Y>(call, inputs);
  });
  if (!is_known) throw BadNode(node + ": x must be " + kQuantizedTypes);
}

#if defined(QUARK_CUDA)
template <ort::ElementType kFloatType>
void ExtendedDequantizeLinear<kFloatType>::compute_on_cuda(const Call& call) const {
  const LinearInputs inputs = read_linear_inputs(call, axis, node);
  if (inputs.x.type != inputs.zero_point.type) throw BadNode(node + ": x and the zero point must have one type");
  const std::string refusal = node + ": x must be " + kQuantizedTypes;
  gpu::dequantize_linear(on_cuda(call, inputs, inputs.scale.type, inputs.x.type, refusal), call.stream());
}
#endif

template struct ExtendedDequantizeLinear<ort::kFloat>;
template struct ExtendedDequantizeLinear<ort::kFloat16>;

}  // namespace quark
