// The two entry points: ONNX Runtime's, and the one that numpy arrays are quantized through.
#include <algorithm>
#include <thread>
#include <vector>

#include "formats/block_job.h"
#include "registry.h"

using namespace quark;

// ONNX Runtime calls this when a session registers the library.
extern "C" QUARK_EXPORT ort::Status* QUARK_ORT_CALL RegisterCustomOps(ort::SessionOptions* options,
                                                                       const ort::ApiBase* base) {
  const void* const* table = base->get_api(ort::kApiVersion);
  if (table == nullptr) {
    // Without an interface of our version there is none to make a message of our own with; the first one has it.
    const ort::Api oldest(base->get_api(1));
    return oldest.create_status(ort::kFail, "quark: this ONNX Runtime is too old; version 1.17 or newer is needed");
  }
  return register_operators(ort::Api(table), options);
}

// Quantizes a contiguous array seen as (outer, n, inner) along n. 0 on success; 1 for parameters out of range.
// `in` and `out` must not overlap.
extern "C" QUARK_EXPORT int quark_quantize_dequantize(const void* in, void* out, int32_t storage, int64_t outer,
                                                      int64_t n, int64_t inner, const BlockParameters* parameters,
                                                      int32_t threads) {
  if (storage < 0 || storage > 1 || outer < 0 || n < 0 || inner < 0 || parameters->block_size < 1) return 1;
  const BlockJob job = make_block_job(in, out, static_cast<Storage>(storage), {outer, n, inner}, *parameters);
  const RunChunks run = best_run_chunks();
  const int64_t workers = std::min<int64_t>(std::max<int32_t>(threads, 1), job.chunks);
  std::vector<std::thread> others;
  for (int64_t w = 1; w < workers; ++w) {
    others.emplace_back([&, w] { run(job, job.chunks * w / workers, job.chunks * (w + 1) / workers); });
  }
  if (job.chunks > 0) run(job, 0, job.chunks / std::max<int64_t>(workers, 1));
  for (std::thread& other : others) other.join();
  return 0;
}

// "avx512", "avx2" or "baseline": the code that runs on this processor.
extern "C" QUARK_EXPORT const char* quark_instruction_set() { return best_instruction_set(); }
