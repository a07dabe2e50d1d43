// Affine quantization of one run of values that share scale and zero point: what ONNX's QuantizeLinear and
// DequantizeLinear do, for the types that ONNX Runtime's own do not take.
//
//     integers   q = saturate(round_half_even(x / scale) + zero_point),   x' = (q - zero_point) * scale
//     floats     q = cast(x / scale + zero_point), finite values saturating
//
// The quotient is a float32. NaN becomes the zero point of an integer type; Inf saturates there, and stays in a float.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__CUDACC__)
#define QUARK_EVERYWHERE __host__ __device__
#else
#define QUARK_EVERYWHERE
#endif

namespace quark {

struct Half {
  uint16_t bits;
};
struct BrainFloat {
  uint16_t bits;
};

QUARK_EVERYWHERE inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
QUARK_EVERYWHERE inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// ---- the two 16-bit floats; storing rounds half to even and saturates what is finite ----
QUARK_EVERYWHERE inline float to_float(BrainFloat value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

QUARK_EVERYWHERE inline void from_float(float value, BrainFloat* out) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  if (magnitude > 0x7F800000u) rounded = bits | 0x00400000u;
  if (magnitude < 0x7F800000u && magnitude > 0x7F7F0000u) rounded = (bits & 0x80000000u) | 0x7F7F0000u;
  out->bits = static_cast<uint16_t>(rounded >> 16);
}

QUARK_EVERYWHERE inline float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return float_of(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
  return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
}

QUARK_EVERYWHERE inline void from_float(float value, Half* out) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u;
  } else if (magnitude == 0x7F800000u) {
    half = 0x7C00u;
  } else if (magnitude >= 0x477FE000u) {  // 65504 and beyond
    half = 0x7BFFu;
  } else if (magnitude < 0x38800000u) {  // adding 1/2 leaves no bits below 2^-24
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

QUARK_EVERYWHERE inline float to_float(float value) { return value; }
QUARK_EVERYWHERE inline void from_float(float value, float* out) { *out = value; }

// ---- integers ----
// Half to even; a float32 from 2^23 on is an integer already.
QUARK_EVERYWHERE inline float round_half_even(float value) {
  const float magnitude = std::fabs(value);
  const float rounded = (magnitude + 0x1p23f) - 0x1p23f;
  return std::copysign(magnitude < 0x1p23f ? rounded : magnitude, value);
}

template <class Q>
struct LinearQuantizer {
  float scale;
  Q zero_point;

  QUARK_EVERYWHERE void store(float x, Q* out) const {
    constexpr double kLowest = std::numeric_limits<Q>::lowest();
    constexpr double kHighest = std::numeric_limits<Q>::max();
    const float quotient = x / scale;
    const double rounded = quotient == quotient ? round_half_even(quotient) : 0.0f;
    const double shifted = rounded + static_cast<double>(zero_point);
    const double saturated = shifted < kLowest ? kLowest : shifted > kHighest ? kHighest : shifted;
    *out = static_cast<Q>(saturated);
  }
  QUARK_EVERYWHERE float load(Q q) const {
    return static_cast<float>(static_cast<int64_t>(q) - static_cast<int64_t>(zero_point)) * scale;
  }
};

template <class Float>
struct LinearFloatQuantizer {
  float scale;
  Float zero_point;

  QUARK_EVERYWHERE void store(float x, Float* out) const { from_float(x / scale + to_float(zero_point), out); }
  QUARK_EVERYWHERE float load(Float q) const { return (to_float(q) - to_float(zero_point)) * scale; }
};
template <>
struct LinearQuantizer<Half> : LinearFloatQuantizer<Half> {};
template <>
struct LinearQuantizer<BrainFloat> : LinearFloatQuantizer<BrainFloat> {};

}  // namespace quark
