#include "extended_quantize_linear.h"

namespace quark {
namespace {

template <class Q, class X>
void quantize(const Call& call, const LinearInputs& inputs) {
  const Tensor out = call.output(inputs.x.shape, inputs.zero_point.type);
  const X* x = static_cast<const X*>(inputs.x.data);
  Q* q = static_cast<Q*>(out.data);
  for_each_run(call, inputs, [&](int64_t begin, int64_t end, int64_t channel) {
    LinearQuantizer<Q> quantizer;
    quantizer.scale = scale_at(inputs.scale, channel);
    quantizer.zero_point = static_cast<const Q*>(inputs.zero_point.data)[channel];
    for (int64_t i = begin; i < end; ++i) quantizer.store(to_float(x[i]), q + i);
  });
}

}  // namespace

template <ort::ElementType kFloatType>
void ExtendedQuantizeLinear<kFloatType>::compute(const Call& call) const {
  typedef std::conditional_t<kFloatType == ort::kFloat, float, Half> X;
  const LinearInputs inputs = read_linear_inputs(call, axis, node);
  const bool is_known = with_quantized_type(inputs.zero_point.type, [&](auto* tag) {
    quantize<std::remove_pointer_t<decltype(tag)>, X>(call, inputs);
  });
  if (!is_known) throw BadNode(node + ": the zero point must be " + kQuantizedTypes);
}

#if defined(QUARK_CUDA)
template <ort::ElementType kFloatType>
void ExtendedQuantizeLinear<kFloatType>::compute_on_cuda(const Call& call) const {
  const LinearInputs inputs = read_linear_inputs(call, axis, node);
  const std::string refusal = node + ": the zero point must be " + kQuantizedTypes;
  gpu::quantize_linear(on_cuda(call, inputs, inputs.zero_point.type, inputs.zero_point.type, refusal), call.stream());
}
#endif

template struct ExtendedQuantizeLinear<ort::kFloat>;
template struct ExtendedQuantizeLinear<ort::kFloat16>;

}  // namespace quark
