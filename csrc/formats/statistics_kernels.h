// The statistics of calibration in vectors of W floats. Included after double_lanes.h, and plane_sums_kernels.h for one
// of them, by the per-ISA files only.
#include "statistics.h"

namespace quark {
namespace QUARK_ISA {

// ---- extremes ----
struct ExtremeLanes {
  FloatsOf<kWidth> lowest, highest;
  IntsOf<kWidth> magnitude;  // the largest bits without the sign: beyond those of FLT_MAX is Inf or NaN

  QUARK_INLINE void add(const float* p) {
    const FloatsOf<kWidth> v = load<kWidth>(p);
    lowest = minimum<kWidth>(v, lowest);
    highest = maximum<kWidth>(v, highest);
    magnitude = maximum_int<kWidth>(bit_cast<IntsOf<kWidth>>(v) & 0x7FFFFFFF, magnitude);
  }
};

inline Extremes extremes(const float* x, int64_t n) {
  const FloatsOf<kWidth> first = splat<kWidth>(x[0]);
  ExtremeLanes even{first, first, splat_int<kWidth>(0)};
  ExtremeLanes odd = even;
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    prefetch(x + i, 512);
    even.add(x + i);
    odd.add(x + i + kWidth);
  }
  for (; i + kWidth <= n; i += kWidth) even.add(x + i);
  odd.add(Tail<kWidth>(x + i, n - i, x[0]).values);
  const FloatsOf<kWidth> lowest = minimum<kWidth>(even.lowest, odd.lowest);
  const FloatsOf<kWidth> highest = maximum<kWidth>(even.highest, odd.highest);
  const IntsOf<kWidth> magnitude = maximum_int<kWidth>(even.magnitude, odd.magnitude);
  Extremes found{x[0], x[0], true};
  for (int k = 0; k < kWidth; ++k) {
    found.lowest = lowest[k] < found.lowest ? lowest[k] : found.lowest;
    found.highest = highest[k] > found.highest ? highest[k] : found.highest;
    found.is_finite = found.is_finite && magnitude[k] < 0x7F800000;
  }
  return found;
}

// ---- histogram ----
constexpr int64_t kIndexBlock = 512;

// Multiplying in float64 keeps the bins of a range of any width apart, and numpy does the same.
QUARK_INLINE void find_bins(const float* x, const Bins& bins, int32_t* out) {
  const Doubles scaled = (load_doubles(x) - bins.lowest) * bins.per_unit;
  const Doubles inside = clamp(scaled, splat_double(0), splat_double(bins.count - 1));
  const HalfInts index = __builtin_convertvector(inside, HalfInts);
  std::memcpy(out, &index, sizeof index);
}

inline void histogram(const float* x, int64_t n, const Bins& bins, uint32_t* counts) {
  int32_t index[kIndexBlock];
  uint32_t* const copies[kHistogramCopies] = {counts, counts + bins.count, counts + 2 * bins.count,
                                              counts + 3 * bins.count};
  for (int64_t start = 0; start < n; start += kIndexBlock) {
    const int64_t count = n - start < kIndexBlock ? n - start : kIndexBlock;
    int64_t i = 0;
    for (; i + kHalfWidth <= count; i += kHalfWidth) find_bins(x + start + i, bins, index + i);
    if (i < count) find_bins(Tail<kHalfWidth>(x + start + i, count - i, 0.0f).values, bins, index + i);
    for (i = 0; i + kHistogramCopies <= count; i += kHistogramCopies) {
      for (int64_t k = 0; k < kHistogramCopies; ++k) ++copies[k][index[i + k]];
    }
    for (; i < count; ++i) ++counts[index[i]];
  }
}

// ---- squared errors ----
// For |c| <= 2^22 (2^51 in float64): adding this leaves no bits below one, rounding half to even.
constexpr float kRound = 0x1.8p23f;
constexpr double kRoundWide = 0x1.8p52;

// Half to even.
QUARK_INLINE FloatsOf<kWidth> round_to_integer(FloatsOf<kWidth> v) {
#if defined(__AVX512F__)
  return _mm512_maskz_roundscale_ps(static_cast<__mmask16>(-1), v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (v + kRound) - kRound;
#endif
}

struct ErrorSums {
  Doubles first, second;

  QUARK_INLINE void add(const float* p, float scale, float half) {
    const FloatsOf<kWidth> steps = load<kWidth>(p) * scale;
    const FloatsOf<kWidth> clipped =
        minimum<kWidth>(maximum<kWidth>(steps, splat<kWidth>(-half)), splat<kWidth>(half - 1));
    add_squares(round_to_integer(clipped) - steps);  // exact: what lies within is off by half a step at most
  }

  QUARK_INLINE void add_squares(FloatsOf<kWidth> error) {
    const DoublePair wide = widen(error);
#if defined(__AVX512F__)
    first = _mm512_fmadd_pd(wide.low, wide.low, first);
    second = _mm512_fmadd_pd(wide.high, wide.high, second);
#else
    first += wide.low * wide.low;
    second += wide.high * wide.high;
#endif
  }
};

inline double squared_error(const float* x, int64_t n, float scale, float half) {
  ErrorSums even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    even.add(x + i, scale, half);
    odd.add(x + i + kWidth, scale, half);
  }
  for (; i + kWidth <= n; i += kWidth) even.add(x + i, scale, half);
  if (i < n) odd.add(Tail<kWidth>(x + i, n - i, 0.0f).values, scale, half);
  return sum_of((even.first + even.second) + (odd.first + odd.second));
}

QUARK_INLINE Doubles wide_square(const float* p, double scale, double half) {
  const Doubles steps = load_doubles(p) * scale;
  const Doubles clipped = clamp(steps, splat_double(-half), splat_double(half - 1));
  const Doubles error = ((clipped + kRoundWide) - kRoundWide) - steps;
  return error * error;
}

inline double squared_error_wide(const float* x, int64_t n, double scale, double half) {
  Doubles sum{};
  int64_t i = 0;
  for (; i + kHalfWidth <= n; i += kHalfWidth) sum += wide_square(x + i, scale, half);
  if (i < n) sum += wide_square(Tail<kHalfWidth>(x + i, n - i, 0.0f).values, scale, half);
  return sum_of(sum);
}

StatisticsKernels statistics_kernels() { return {extremes, histogram, squared_error, squared_error_wide, plane_sums}; }

}  // namespace QUARK_ISA
}  // namespace quark
