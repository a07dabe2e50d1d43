// What kernels.cu needs of CUDA, on the processor: a warp is 32 coroutines that meet where lanes exchange numbers.
#pragma once

#include <cstdint>
#include <cstring>
#include <cmath>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct Dim {
  unsigned x;
};
extern thread_local Dim threadIdx, blockIdx, gridDim;

// Gives `value` to the others and returns what the lane at `distance` gave.
uint64_t exchange(uint64_t value, int distance);

template <class T>
T __shfl_xor_sync(uint32_t, T value, int distance) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = exchange(bits, distance);
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint64_t __brevll(uint64_t value) {
  uint64_t reversed = 0;
  for (int bit = 0; bit < 64; ++bit) reversed |= (value >> bit & 1) << (63 - bit);
  return reversed;
}

inline void atomicMax(int32_t* address, int32_t value) {
  if (value > *address) *address = value;
}

namespace quark {
namespace gpu {

inline float widen_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  uint32_t bits = sign | ((magnitude << 13) + 0x38000000u);
  if (magnitude > 0x7C00u) bits = 0x7FFFFFFFu;  // the device's NaN
  if (magnitude == 0x7C00u) bits = sign | 0x7F800000u;
  float value;
  memcpy(&value, &bits, sizeof value);
  if (magnitude >= 0x0400u) return value;
  value = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -value : value;
}

inline uint16_t narrow_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFFu;  // the device's NaN
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude >= 0x38800000u) {
    return static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13);
  }
  float shifted;
  memcpy(&shifted, &magnitude, sizeof shifted);
  shifted += 0.5f;
  memcpy(&bits, &shifted, sizeof bits);
  return static_cast<uint16_t>(sign | (bits - 0x3F000000u));
}

}  // namespace gpu
}  // namespace quark
