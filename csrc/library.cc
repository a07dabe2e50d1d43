// The two entry points: ONNX Runtime's, and the one that numpy arrays are quantized through.
#include <algorithm>
#include <atomic>
#include <new>

#include "formats/block_job.h"
#include "registry.h"
#include "threads.h"

using namespace quark;

// ONNX Runtime calls this when a session registers the library.
extern "C" QUARK_EXPORT ort::Status* QUARK_ORT_CALL RegisterCustomOps(ort::SessionOptions* options,
                                                                       const ort::ApiBase* base) {
  const void* const* table = base->get_api(ort::kApiVersion);
  if (table == nullptr) {
    // Without an interface of our version there is none to make a message of our own with; the first one has it.
    const ort::Api oldest(base->get_api(1));
    return oldest.create_status(ort::kFail, "quark: this ONNX Runtime is too old; version 1.18 or newer is needed");
  }
  return register_operators(ort::Api(table), options);
}

namespace {

// The tensor's scale, by this thread and others.
float find_tensor_scale(const void* in, Storage storage, int64_t count, const BlockParameters& parameters,
                        int64_t workers) {
  const LargestFinite largest = best_largest_finite();
  std::atomic<int32_t> most{0};
  run_on_own_threads(workers, [&](int64_t worker) {
    const int32_t own = largest(in, storage, count * worker / workers, count * (worker + 1) / workers);
    int32_t known = most;
    while (own > known && !most.compare_exchange_weak(known, own)) {
    }
  });
  return tensor_scale_of(most, parameters);
}

// Shares the chunks out over this thread and others. Throws std::bad_alloc if a share ran out of memory.
void run_on_threads(const BlockJob& job, int64_t workers) {
  const RunChunks run = best_run_chunks();
  std::atomic<bool> out_of_memory{false};
  run_on_own_threads(workers, [&](int64_t worker) {
    try {
      run(job, job.chunks * worker / workers, job.chunks * (worker + 1) / workers);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  });
  if (out_of_memory) throw std::bad_alloc();
}

}  // namespace

// Quantizes a contiguous array seen as (outer, n, inner) along n. 0 on success; 1 for parameters out of range, 2 for
// want of memory. `in` and `out` must not overlap.
extern "C" QUARK_EXPORT int quark_quantize_dequantize(const void* in, void* out, int32_t storage, int64_t outer,
                                                      int64_t n, int64_t inner, const BlockParameters* parameters,
                                                      int32_t threads) {
  if (storage < 0 || storage > 1 || outer < 0 || n < 0 || inner < 0 || !are_in_range(*parameters)) return 1;
  try {
    BlockParameters complete = *parameters;
    if (has_float_scale(complete) && complete.tensor_scale < 0.0f) {
      const int64_t count = outer * n * inner;
      const int64_t workers = std::clamp<int64_t>(threads, 1, 1 + count / kLargestElements);
      complete.tensor_scale = find_tensor_scale(in, static_cast<Storage>(storage), count, complete, workers);
    }
    const BlockJob job = make_block_job(in, out, static_cast<Storage>(storage), {outer, n, inner}, complete);
    if (job.chunks > 0) run_on_threads(job, std::clamp<int64_t>(threads, 1, job.chunks));
    return 0;
  } catch (const std::bad_alloc&) {
    return 2;
  }
}

// "avx512", "avx2" or "baseline": the code that runs on this processor.
extern "C" QUARK_EXPORT const char* quark_instruction_set() { return best_instruction_set(); }
