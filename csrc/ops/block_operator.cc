#include "block_operator.h"

#include <algorithm>

#if defined(QUARK_CUDA)
#include "../cuda/launch.h"
#endif
#include "../formats/format_table.h"

namespace quark {

BlockOperator::Tensors BlockOperator::read_tensors(const Call& call) const {
  const Tensor in = call.input(0);
  const size_t at = normalize_axis(axis, in.shape.size(), node);
  if (in.type != ort::kFloat && in.type != ort::kFloat16) throw BadNode(node + ": expected float32 or float16");
  Geometry geometry{1, 1, 1};
  for (size_t i = 0; i < in.shape.size(); ++i) {
    (i < at ? geometry.outer : i == at ? geometry.n : geometry.inner) *= in.shape[i];
  }
  const Storage storage = in.type == ort::kFloat ? Storage::kFloat32 : Storage::kFloat16;
  return {in, call.output(in.shape, in.type), storage, geometry};
}

void BlockOperator::compute(const Call& call) const {
  const Tensors tensors = read_tensors(call);
  BlockParameters complete = parameters;
  if (has_float_scale(complete)) {
    complete.tensor_scale =
        call.has_input(1) ? given_tensor_scale(call) : find_tensor_scale(call, tensors.in, tensors.storage);
  }
  run(call, make_block_job(tensors.in.data, tensors.out.data, tensors.storage, tensors.geometry, complete));
}

void BlockOperator::run(const Call& call, const BlockJob& job) {
  const RunChunks run = best_run_chunks();
  call.parallel(job.chunks, [&](int64_t chunk) { run(job, chunk, chunk + 1); });
}

#if defined(QUARK_CUDA)
void BlockOperator::compute_on_cuda(const Call& call) const {
  const Tensors tensors = read_tensors(call);
  BlockParameters complete = parameters;
  if (has_float_scale(complete)) complete.tensor_scale = call.has_input(1) ? given_tensor_scale(call) : -1.0f;
  gpu::quantize_dequantize(tensors.in.data, tensors.out.data, tensors.storage, tensors.geometry, complete,
                           call.stream());
}
#endif

float BlockOperator::given_tensor_scale(const Call& call) const {
  const Tensor given = call.input(1);
  if (given.type != ort::kFloat || given.count() != 1) {
    throw BadNode(node + ": input 'tensor_scale' has the shape " + describe(given.shape) +
                  "; expected one float32 number");
  }
  const float scale = *static_cast<const float*>(given.data);
  BlockParameters complete = parameters;
  complete.tensor_scale = scale;
  if (scale >= 0.0f && are_in_range(complete)) return scale;
  throw BadNode(node + ": input 'tensor_scale' is " + std::to_string(scale) +
                "; expected a number of at least 0 that times the largest block scale is finite");
}

float BlockOperator::find_tensor_scale(const Call& call, const Tensor& x, Storage storage) const {
  const LargestFinite largest = best_largest_finite();
  const int64_t count = x.count();
  std::vector<int32_t> most(static_cast<size_t>((count + kLargestElements - 1) / kLargestElements), 0);
  call.parallel(static_cast<int64_t>(most.size()), [&](int64_t piece) {
    const int64_t end = std::min(count, (piece + 1) * kLargestElements);
    most[static_cast<size_t>(piece)] = largest(x.data, storage, piece * kLargestElements, end);
  });
  return tensor_scale_of(most.empty() ? 0 : *std::max_element(most.begin(), most.end()), parameters);
}

void read_element(const Attributes& attributes, const char* absent, BlockParameters& parameters) {
  const ElementRow& row = kMxElements[attributes.choice("element_dtype", mx_element_index(absent), mx_element_names())];
  parameters.mantissa_bits = row.mantissa_bits;
  parameters.min_exponent = row.min_exponent;
  parameters.max_exponent = row.max_exponent;
  parameters.lowest = row.lowest;
  parameters.highest = row.highest;
}

ScaleRule read_scale_rule(const Attributes& attributes) {
  return static_cast<ScaleRule>(attributes.choice("scale_rule", 0, {"floor", "ceil", "even", "rceil", "mse"}));
}

Rounding read_rounding(const Attributes& attributes, Rounding absent) {
  return static_cast<Rounding>(attributes.integer("rounding_mode", static_cast<int64_t>(absent), 0, 2));
}

NonFinite read_nonfinite(const Attributes& attributes, NonFinite absent) {
  return static_cast<NonFinite>(
      attributes.choice("nonfinite", static_cast<size_t>(absent), {"block_nan", "passthrough"}));
}

}  // namespace quark
