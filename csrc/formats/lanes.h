// Vectors of W floats, in GCC/Clang vector extensions, so that one text serves SSE2, AVX2, AVX-512 and NEON.
//
// Included only by the per-ISA kernel files, inside namespace QUARK_ISA: the same templates compiled for another
// instruction set must be other symbols, or the linker would keep one and an older processor would meet it.
// For the same reason nothing here calls an inline function of the standard library.

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// A call would send vectors through memory.
#define QUARK_INLINE inline __attribute__((always_inline))
// For rare work, which a copy in every loop would only make larger.
#define QUARK_NOINLINE __attribute__((noinline))

namespace quark {
namespace QUARK_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

template <int W>
struct Lanes {
  typedef float F __attribute__((vector_size(4 * W)));
  typedef int32_t I __attribute__((vector_size(4 * W)));
};
template <>
struct Lanes<1> {
  typedef float F;
  typedef int32_t I;
};

template <int W>
using FloatsOf = typename Lanes<W>::F;
template <int W>
using IntsOf = typename Lanes<W>::I;

template <class To, class From>
QUARK_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <int W>
inline FloatsOf<W> splat(float value) {
  return value - FloatsOf<W>{};  // x - 0 is always x and costs nothing; x + 0 is not for -0
}
template <int W>
inline IntsOf<W> splat_int(int32_t value) {
  return IntsOf<W>{} + value;
}

// ---- minimum and maximum; where one operand is NaN the second is returned, as x86 does ----
template <int W>
inline FloatsOf<W> minimum(FloatsOf<W> a, FloatsOf<W> b) {
  return a < b ? a : b;
}
template <int W>
inline FloatsOf<W> maximum(FloatsOf<W> a, FloatsOf<W> b) {
  return a > b ? a : b;
}
template <int W>
inline IntsOf<W> maximum_int(IntsOf<W> a, IntsOf<W> b) {
  return a > b ? a : b;
}
template <int W>
inline IntsOf<W> minimum_int(IntsOf<W> a, IntsOf<W> b) {
  return a < b ? a : b;
}
#if defined(__AVX512F__)
template <>
inline FloatsOf<16> minimum<16>(FloatsOf<16> a, FloatsOf<16> b) {
  return _mm512_maskz_min_ps(static_cast<__mmask16>(-1), a, b);  // _mm512_min_ps makes GCC 12 warn about its own header
}
template <>
inline FloatsOf<16> maximum<16>(FloatsOf<16> a, FloatsOf<16> b) {
  return _mm512_maskz_max_ps(static_cast<__mmask16>(-1), a, b);
}
#endif
#if defined(__AVX2__)
template <>
inline FloatsOf<8> minimum<8>(FloatsOf<8> a, FloatsOf<8> b) {
  return _mm256_min_ps(a, b);
}
template <>
inline FloatsOf<8> maximum<8>(FloatsOf<8> a, FloatsOf<8> b) {
  return _mm256_max_ps(a, b);
}
#endif

// True if a comparison holds in some lane.
template <int W>
QUARK_INLINE bool any(IntsOf<W> mask) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return _mm512_movepi32_mask(bit_cast<__m512i>(mask)) != 0;
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) return _mm256_movemask_ps(bit_cast<__m256>(mask)) != 0;
#endif
#if defined(__SSE2__)
  if constexpr (W == 4) return _mm_movemask_ps(bit_cast<__m128>(mask)) != 0;
#endif
  int32_t lanes = 0;
  for (int lane = 0; lane < W; ++lane) lanes |= mask[lane];
  return lanes != 0;
}

// ---- the largest lane of each group of kGroup neighbours, in all lanes of the group ----
template <int kDistance>
inline IntsOf<4> swap_lanes(IntsOf<4> v) {
  constexpr int d = kDistance;
  return __builtin_shufflevector(v, v, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d);
}
template <int kDistance>
inline IntsOf<8> swap_lanes(IntsOf<8> v) {
  constexpr int d = kDistance;
  return __builtin_shufflevector(v, v, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d, 4 ^ d, 5 ^ d, 6 ^ d, 7 ^ d);
}
template <int kDistance>
inline IntsOf<16> swap_lanes(IntsOf<16> v) {
  constexpr int d = kDistance;
  return __builtin_shufflevector(v, v, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d, 4 ^ d, 5 ^ d, 6 ^ d, 7 ^ d, 8 ^ d, 9 ^ d, 10 ^ d,
                                 11 ^ d, 12 ^ d, 13 ^ d, 14 ^ d, 15 ^ d);
}

template <int W, int kGroup>
inline IntsOf<W> group_maximum(IntsOf<W> v) {
  static_assert(kGroup <= W, "a group lies within one vector");
  if constexpr (W > 1) {
    if constexpr (kGroup > 8) v = maximum_int<W>(v, swap_lanes<8>(v));
    if constexpr (kGroup > 4) v = maximum_int<W>(v, swap_lanes<4>(v));
    if constexpr (kGroup > 2) v = maximum_int<W>(v, swap_lanes<2>(v));
    if constexpr (kGroup > 1) v = maximum_int<W>(v, swap_lanes<1>(v));
  }
  return v;
}

// The largest lane of each group in each of kGroup vectors: lane i of a group of the result is that of vector i.
// Overwrites the vectors.
template <int W, int kDistance>
QUARK_INLINE void merge_maxima(IntsOf<W>* vectors) {
  IntsOf<W> is_upper;
  for (int lane = 0; lane < W; ++lane) is_upper[lane] = lane & kDistance ? -1 : 0;
  for (int i = 0; i < kDistance; ++i) {
    const IntsOf<W> own = is_upper ? vectors[i + kDistance] : vectors[i];
    const IntsOf<W> other = is_upper ? vectors[i] : vectors[i + kDistance];
    vectors[i] = maximum_int<W>(own, swap_lanes<kDistance>(other));
  }
}
template <int W, int kGroup>
QUARK_INLINE IntsOf<W> group_maxima(IntsOf<W>* vectors) {
  if constexpr (kGroup > 8) merge_maxima<W, 8>(vectors);
  if constexpr (kGroup > 4) merge_maxima<W, 4>(vectors);
  if constexpr (kGroup > 2) merge_maxima<W, 2>(vectors);
  if constexpr (kGroup > 1) merge_maxima<W, 1>(vectors);
  return vectors[0];
}

// Lane i of each group of kGroup lanes at that address, in all lanes of the group.
template <int W, int kGroup>
QUARK_INLINE FloatsOf<W> spread_lane(const float* lanes, int i) {
  static_assert(W <= 2 * kGroup, "one group or two");
  if constexpr (kGroup == W) return splat<W>(lanes[i]);
  IntsOf<W> is_second;
  for (int lane = 0; lane < W; ++lane) is_second[lane] = lane < kGroup ? 0 : -1;
  return is_second ? splat<W>(lanes[kGroup + i]) : splat<W>(lanes[i]);
}

// ---- memory: float32 as it is, float16 (carried as its bits) widened and rounded to nearest even ----
QUARK_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // Inf, or NaN made quiet
    const uint32_t payload = (magnitude & 0x3FFu) << 13;
    return bit_cast<float>(sign | 0x7F800000u | payload | (payload ? 0x00400000u : 0u));
  }
  if (magnitude >= 0x0400u) return bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;  // exact
  return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
}

QUARK_INLINE uint16_t float_to_half(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and beyond round to Inf
  if (magnitude < 0x38800000u) {                        // below 2^-14: 0.5 * 2^-1 ... an add rounds to 2^-24
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(bit_cast<uint32_t>(shifted) - 0x3F000000u);
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xFFFu + odd) >> 13);
}

template <int W>
inline FloatsOf<W> load(const float* p) {
  FloatsOf<W> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <int W>
QUARK_INLINE void store(float* p, FloatsOf<W> v) {
  std::memcpy(p, &v, sizeof v);
}

QUARK_INLINE void widen(const uint16_t* in, float* out, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
#endif
  for (; i < count; ++i) out[i] = half_to_float(in[i]);
}

QUARK_INLINE void narrow(const float* in, uint16_t* out, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
#endif
  for (; i < count; ++i) out[i] = float_to_half(in[i]);
}

QUARK_INLINE float round_to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) >= 0x7F800000u) return value;
  return bit_cast<float>((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}

// Fetches p + ahead into the cache; beyond the end of an array that is harmless, but a pointer there would not be.
QUARK_INLINE void prefetch(const float* p, int64_t ahead) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(ahead) * sizeof(float);
  __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 3);
}

// A store past the caches, for outputs too large to be found there again; p is aligned to the vector.
template <int W>
QUARK_INLINE void stream(float* p, FloatsOf<W> v) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return _mm512_stream_ps(p, v);
#endif
#if defined(__AVX__)
  if constexpr (W == 8) return _mm256_stream_ps(p, v);
#endif
#if defined(__SSE2__)
  if constexpr (W == 4) return _mm_stream_ps(p, v);
#endif
  store<W>(p, v);
}

template <int W, bool kStream>
QUARK_INLINE void put(float* p, FloatsOf<W> v) {
  if constexpr (kStream) {
    stream<W>(p, v);
  } else {
    store<W>(p, v);
  }
}

QUARK_INLINE bool is_aligned(const float* p) { return reinterpret_cast<uintptr_t>(p) % (4 * kWidth) == 0; }

// Streams to any address: what lies before and after the aligned part is stored as usual.
QUARK_INLINE void stream_copy(const float* in, float* out, int64_t count) {
  int64_t i = 0;
  for (; i < count && !is_aligned(out + i); ++i) out[i] = in[i];
  for (; i + kWidth <= count; i += kWidth) stream<kWidth>(out + i, load<kWidth>(in + i));
  for (; i < count; ++i) out[i] = in[i];
}

QUARK_INLINE void finish_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace QUARK_ISA
}  // namespace quark
