#include "linear_operator.h"

namespace quark {
namespace {

bool is_single(const Tensor& tensor) { return tensor.shape.empty() || (tensor.shape.size() == 1 && tensor.shape[0] == 1); }

}  // namespace

LinearInputs read_linear_inputs(const Call& call, int64_t axis, const std::string& node) {
  LinearInputs inputs{call.input(0), call.input(1), call.input(2), 1, 1};
  const std::vector<int64_t>& shape = inputs.x.shape;
  if (is_single(inputs.scale)) {
    if (!is_single(inputs.zero_point)) {
      throw BadNode(node + ": one scale, but zero points of shape " + describe(inputs.zero_point.shape));
    }
    const int64_t count = inputs.x.count();
    inputs.inner = count > 0 ? count : 1;
    return inputs;
  }
  const size_t at = normalize_axis(axis, shape.size(), node);
  const int64_t channels = shape.empty() ? 1 : shape[at];
  const std::vector<int64_t> expected{channels};
  if (inputs.scale.shape != expected || inputs.zero_point.shape != expected) {
    throw BadNode(node + ": scale and zero point of shapes " + describe(inputs.scale.shape) + " and " +
                  describe(inputs.zero_point.shape) + "; expected scalars or " + describe(expected) +
                  ", one for each index of axis " + std::to_string(at) + " of x " + describe(shape));
  }
  inputs.channels = channels > 0 ? channels : 1;
  for (size_t i = at + 1; i < shape.size(); ++i) inputs.inner *= shape[i] > 0 ? shape[i] : 1;
  return inputs;
}

#if defined(QUARK_CUDA)
gpu::LinearTensors on_cuda(const Call& call, const LinearInputs& inputs, ort::ElementType output,
                           ort::ElementType quantized, const std::string& refusal) {
  const std::pair<ort::ElementType, gpu::QuantizedType> types[] = {
      {ort::kInt8, gpu::QuantizedType::kInt8},       {ort::kUInt8, gpu::QuantizedType::kUInt8},
      {ort::kInt16, gpu::QuantizedType::kInt16},     {ort::kUInt16, gpu::QuantizedType::kUInt16},
      {ort::kInt32, gpu::QuantizedType::kInt32},     {ort::kUInt32, gpu::QuantizedType::kUInt32},
      {ort::kFloat16, gpu::QuantizedType::kFloat16}, {ort::kBFloat16, gpu::QuantizedType::kBFloat16}};
  for (const auto& type : types) {
    if (type.first != quantized) continue;
    const Storage storage = inputs.scale.type == ort::kFloat ? Storage::kFloat32 : Storage::kFloat16;
    return {inputs.x.data,
            inputs.scale.data,
            inputs.zero_point.data,
            call.output(inputs.x.shape, output).data,
            storage,
            type.second,
            inputs.x.count(),
            inputs.channels,
            inputs.inner};
  }
  throw BadNode(refusal);
}
#endif

float scale_at(const Tensor& scale, int64_t channel) {
  if (scale.type == ort::kFloat) return static_cast<const float*>(scale.data)[channel];
  return to_float(static_cast<const Half*>(scale.data)[channel]);
}

}  // namespace quark
