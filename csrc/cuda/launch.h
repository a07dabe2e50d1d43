// The operators on tensors in a CUDA device's memory: which kernel takes a tensor, and what it is told.
#pragma once

#include <cstdint>

#include "../formats/block_job.h"

namespace quark {
namespace gpu {

// As quark_quantize_dequantize does it, on a stream; the result is there when the stream gets there. `in` and `out` must
// not overlap. A negative tensor scale is found from the tensor. Throws std::runtime_error.
void quantize_dequantize(const void* in, void* out, Storage storage, const Geometry& geometry,
                         const BlockParameters& parameters, void* stream);

// The types that the affine operators have on one side; the order is that of the names in launch.cc.
enum class QuantizedType : int32_t { kInt8, kUInt8, kInt16, kUInt16, kInt32, kUInt32, kFloat16, kBFloat16 };

struct LinearTensors {
  const void* x;
  const void* scale;
  const void* zero_point;
  void* y;
  Storage storage;  // of the floating-point side
  QuantizedType type;
  int64_t count;
  int64_t channels;  // 1: one scale for the whole tensor
  int64_t inner;     // neighbours that share a channel
};

void quantize_linear(const LinearTensors& tensors, void* stream);
void dequantize_linear(const LinearTensors& tensors, void* stream);

}  // namespace gpu
}  // namespace quark
