#include "prepared_block_operator.h"

#include <algorithm>

namespace quark {

void PreparedBlockOperator::compute(const Call& call) const {
  const Tensor x = call.input(0);
  const Tensor bounds = call.input(1);
  const Tensor centers = call.input(2);
  const Tensor pads = call.input(3);
  if (x.shape.size() != 4 || (axis != 1 && axis != -3)) {
    throw BadNode(node + ": expected a tensor of rank 4 and blocks along axis 1; the tensor has the shape " +
                  describe(x.shape) + " and axis is " + std::to_string(axis));
  }
  const int64_t channels = x.shape[1];
  Preparation preparation{};
  preparation.bounds = static_cast<const float*>(bounds.data);
  preparation.centers = static_cast<const float*>(centers.data);
  preparation.bounds_step = step_of(bounds, channels, "bounds");
  preparation.centers_step = step_of(centers, channels, "centers");
  const std::vector<int64_t> shape = padded_shape(x, pads, preparation);
  const Tensor out = call.output(shape, ort::kFloat);
  const Geometry geometry{shape[0], shape[1], shape[2] * shape[3]};
  const BlockJob job = make_block_job(x.data, out.data, Storage::kFloat32, geometry, parameters, &preparation);
  if (!has_float_scale(parameters)) return run(call, job);
  // the whole tensor is needed for its scale: what was prepared for that is quantized in place
  const PrepareChunks prepare = best_prepare_chunks();
  std::vector<int32_t> most(static_cast<size_t>(job.chunks), 0);
  call.parallel(job.chunks, [&](int64_t chunk) { most[static_cast<size_t>(chunk)] = prepare(job, chunk, chunk + 1); });
  BlockParameters complete = parameters;
  complete.tensor_scale = tensor_scale_of(most.empty() ? 0 : *std::max_element(most.begin(), most.end()), parameters);
  run(call, make_block_job(out.data, out.data, Storage::kFloat32, geometry, complete));
}

int64_t PreparedBlockOperator::step_of(const Tensor& numbers, int64_t channels, const char* name) const {
  const int64_t count = numbers.count();
  if (count == 1) return 0;
  if (count == channels) return 1;
  throw BadNode(node + ": input '" + name + "' has the shape " + describe(numbers.shape) +
                "; expected one number, or one for each of " + std::to_string(channels) + " channels");
}

std::vector<int64_t> PreparedBlockOperator::padded_shape(const Tensor& x, const Tensor& pads,
                                                         Preparation& preparation) const {
  const auto* given = static_cast<const int64_t*>(pads.data);
  const int64_t count = pads.count();
  const bool is_legal = count == 8 && std::all_of(given, given + count, [](int64_t n) { return n >= 0; }) &&
                        given[0] == 0 && given[1] == 0 && given[4] == 0 && given[5] == 0;
  if (!is_legal) {
    throw BadNode(node + ": input 'pads' has " + std::to_string(count) +
                  " numbers; expected 8 of at least 0, with zeros for batch and channels");
  }
  preparation.height = x.shape[2];
  preparation.width = x.shape[3];
  preparation.top = given[2];
  preparation.left = given[3];
  preparation.padded_width = x.shape[3] + given[3] + given[7];
  return {x.shape[0], x.shape[1], x.shape[2] + given[2] + given[6], preparation.padded_width};
}

}  // namespace quark
