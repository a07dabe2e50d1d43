// One lane at a time, for code that runs on a GPU: what lanes.h is for processors, under the same names, so that
// formats/lane_math.h is compiled from the same text.
#pragma once

#include <cstdint>
#include <cstring>

#define QUARK_ISA gpu
#if defined(__CUDACC__)
#define QUARK_INLINE __host__ __device__ __forceinline__
#else
#define QUARK_INLINE inline __attribute__((always_inline))
#endif

namespace quark {
namespace gpu {

template <int W>
using FloatsOf = float;
template <int W>
using IntsOf = int32_t;

template <class To, class From>
QUARK_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <int W>
QUARK_INLINE float splat(float value) {
  return value;
}
template <int W>
QUARK_INLINE int32_t splat_int(int32_t value) {
  return value;
}

// Where one operand is NaN the second is returned.
template <int W>
QUARK_INLINE float minimum(float a, float b) {
  return a < b ? a : b;
}
template <int W>
QUARK_INLINE float maximum(float a, float b) {
  return a > b ? a : b;
}
template <int W>
QUARK_INLINE int32_t maximum_int(int32_t a, int32_t b) {
  return a > b ? a : b;
}
template <int W>
QUARK_INLINE int32_t minimum_int(int32_t a, int32_t b) {
  return a < b ? a : b;
}

QUARK_INLINE float round_to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
  return (bits & 0x7FFFFFFFu) < 0x7F800000u ? bit_cast<float>(rounded) : value;
}

}  // namespace gpu
}  // namespace quark
