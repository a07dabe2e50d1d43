// What ExtendedQuantizeLinear and ExtendedDequantizeLinear share: x, scale and zero point, and their walk.
#pragma once

#include <type_traits>

#if defined(QUARK_CUDA)
#include "../cuda/launch.h"
#endif
#include "../formats/linear.h"
#include "custom_op.h"

namespace quark {

struct LinearInputs {
  Tensor x;
  Tensor scale;
  Tensor zero_point;
  int64_t channels;  // 1: one scale for the whole tensor
  int64_t inner;     // neighbours that share a channel
};

// Reads the three inputs; scale and zero point are scalars or one for each index of the axis, or BadNode is thrown.
LinearInputs read_linear_inputs(const Call& call, int64_t axis, const std::string& node);

#if defined(QUARK_CUDA)
// The inputs as a kernel takes them, with an output of that type; `quantized` is the type of the other side. Throws
// BadNode for a type that is none.
gpu::LinearTensors on_cuda(const Call& call, const LinearInputs& inputs, ort::ElementType output,
                           ort::ElementType quantized, const std::string& refusal);
#endif

float scale_at(const Tensor& scale, int64_t channel);

// Runs work(begin, end, channel) over all elements, in runs that share a channel.
template <class Work>
void for_each_run(const Call& call, const LinearInputs& inputs, const Work& work) {
  constexpr int64_t kChunk = 1 << 15;
  const int64_t count = inputs.x.count();
  call.parallel((count + kChunk - 1) / kChunk, [&](int64_t chunk) {
    int64_t begin = chunk * kChunk;
    const int64_t end = begin + kChunk < count ? begin + kChunk : count;
    while (begin < end) {
      const int64_t run = begin / inputs.inner;
      const int64_t stop = (run + 1) * inputs.inner < end ? (run + 1) * inputs.inner : end;
      work(begin, stop, run % inputs.channels);
      begin = stop;
    }
  });
}

// Calls work with a null pointer of the type that holds the quantized values; false for a type that is none.
template <class Work>
bool with_quantized_type(ort::ElementType type, const Work& work) {
  switch (type) {
    case ort::kInt8: work(static_cast<int8_t*>(nullptr)); return true;
    case ort::kUInt8: work(static_cast<uint8_t*>(nullptr)); return true;
    case ort::kInt16: work(static_cast<int16_t*>(nullptr)); return true;
    case ort::kUInt16: work(static_cast<uint16_t*>(nullptr)); return true;
    case ort::kInt32: work(static_cast<int32_t*>(nullptr)); return true;
    case ort::kUInt32: work(static_cast<uint32_t*>(nullptr)); return true;
    case ort::kFloat16: work(static_cast<Half*>(nullptr)); return true;
    case ort::kBFloat16: work(static_cast<BrainFloat*>(nullptr)); return true;
    default: return false;
  }
}

constexpr const char* kQuantizedTypes = "int8, uint8, int16, uint16, int32, uint32, float16 or bfloat16";

}  // namespace quark
