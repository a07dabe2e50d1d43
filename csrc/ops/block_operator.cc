#include "block_operator.h"

#include "../formats/block_job.h"

namespace quark {

void BlockOperator::compute(const Call& call) const {
  const Tensor in = call.input(0);
  const size_t at = normalize_axis(axis, in.shape.size(), node);
  if (in.type != ort::kFloat && in.type != ort::kFloat16) throw BadNode(node + ": expected float32 or float16");
  Geometry geometry{1, 1, 1};
  for (size_t i = 0; i < in.shape.size(); ++i) {
    (i < at ? geometry.outer : i == at ? geometry.n : geometry.inner) *= in.shape[i];
  }
  const Tensor out = call.output(in.shape, in.type);
  const Storage storage = in.type == ort::kFloat ? Storage::kFloat32 : Storage::kFloat16;
  const BlockJob job = make_block_job(in.data, out.data, storage, geometry, parameters);
  const RunChunks run = best_run_chunks();
  call.parallel(job.chunks, [&](int64_t chunk) { run(job, chunk, chunk + 1); });
}

ScaleRule read_scale_rule(const Attributes& attributes) {
  return static_cast<ScaleRule>(attributes.choice("scale_rule", 0, {"floor", "ceil", "even", "rceil", "mse"}));
}

Rounding read_rounding(const Attributes& attributes) {
  return static_cast<Rounding>(attributes.integer("rounding_mode", 0, 0, 2));
}

NonFinite read_nonfinite(const Attributes& attributes, NonFinite absent) {
  return static_cast<NonFinite>(
      attributes.choice("nonfinite", static_cast<size_t>(absent), {"block_nan", "passthrough"}));
}

}  // namespace quark
