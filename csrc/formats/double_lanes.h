// Sums in vectors of doubles. Included after lanes.h by the per-ISA files only.

namespace quark {
namespace QUARK_ISA {

constexpr int kHalfWidth = kWidth / 2;
typedef double Doubles __attribute__((vector_size(4 * kWidth)));  // kHalfWidth of them
typedef int32_t HalfInts __attribute__((vector_size(4 * kHalfWidth)));

inline Doubles load_doubles(const float* p) { return __builtin_convertvector(load<kHalfWidth>(p), Doubles); }

inline Doubles splat_double(double value) { return Doubles{} + value; }

inline Doubles clamp(Doubles v, Doubles lowest, Doubles highest) {
  v = v > lowest ? v : lowest;
  return v < highest ? v : highest;
}

inline double sum_of(Doubles v) {
  double sum = 0;
  for (int i = 0; i < kHalfWidth; ++i) sum += v[i];
  return sum;
}

struct DoublePair {
  Doubles low, high;
};

// The floats of one vector as doubles.
QUARK_INLINE DoublePair widen(FloatsOf<kWidth> v) {
#if defined(__AVX512F__)
  constexpr __mmask8 kAll = static_cast<__mmask8>(-1);
  return {_mm512_maskz_cvtps_pd(kAll, __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7)),
          _mm512_maskz_cvtps_pd(kAll, _mm512_maskz_extractf32x8_ps(kAll, v, 1))};
#elif defined(__AVX2__)
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))};
#else
  float lanes[kWidth];
  store<kWidth>(lanes, v);
  return {load_doubles(lanes), load_doubles(lanes + kHalfWidth)};
#endif
}

// The last elements in a buffer that is filled up with `filler`.
template <int W>
struct Tail {
  float values[W];
  Tail(const float* x, int64_t count, float filler) {
    for (int64_t i = 0; i < W; ++i) values[i] = i < count ? x[i] : filler;
  }
};

}  // namespace QUARK_ISA
}  // namespace quark
