// Entry points for callers that have device pointers and no session: tests and benchmarks.
#include <exception>
#include <string>

#include "../ort_abi.h"
#include "driver.h"
#include "launch.h"

using namespace quark;

namespace {

thread_local std::string g_message;

template <class Work>
int reported(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    g_message = error.what();
    return 2;
  }
}

}  // namespace

// Why no kernel can run in this process; empty if the driver was found.
extern "C" QUARK_EXPORT const char* quark_cuda_problem() { return gpu::driver_problem().c_str(); }

// The message of the calling thread's last failure.
extern "C" QUARK_EXPORT const char* quark_cuda_message() { return g_message.c_str(); }

// As quark_quantize_dequantize, in the calling thread's CUDA context and on one of its streams. 0 on success; 1 for
// parameters out of range, 2 for a failure of CUDA's.
extern "C" QUARK_EXPORT int quark_cuda_quantize_dequantize(const void* in, void* out, int32_t storage, int64_t outer,
                                                           int64_t n, int64_t inner, const BlockParameters* parameters,
                                                           void* stream) {
  if (storage < 0 || storage > 1 || outer < 0 || n < 0 || inner < 0 || !are_in_range(*parameters)) return 1;
  return reported([&] {
    gpu::quantize_dequantize(in, out, static_cast<Storage>(storage), {outer, n, inner}, *parameters, stream);
  });
}

// ExtendedQuantizeLinear (quantizes = 1) or ExtendedDequantizeLinear; the same results.
extern "C" QUARK_EXPORT int quark_cuda_linear(const gpu::LinearTensors* tensors, int32_t quantizes, void* stream) {
  const int32_t type = static_cast<int32_t>(tensors->type);
  if (type < 0 || type > 7 || tensors->count < 0 || tensors->channels < 1 || tensors->inner < 1) return 1;
  return reported([&] {
    if (quantizes) return gpu::quantize_linear(*tensors, stream);
    gpu::dequantize_linear(*tensors, stream);
  });
}
