// What calibration counts over every element of a tensor: extremes, a histogram, squared errors at several positions,
// and sums over the cells of planes, of elements and of what rounding adds to them.
#pragma once

#include <cstdint>

namespace quark {

struct Extremes {
  float lowest;
  float highest;
  bool is_finite;  // no NaN and no Inf among the elements; the other two are only then of use
};

// Evenly spaced bins from `lowest` on, `per_unit` of them to a unit; what lies beyond counts in the outermost.
struct Bins {
  double lowest;
  double per_unit;
  int32_t count;
};

// How planes of rows x columns are cut: the element at (h, w) belongs to the cell (row_group[h], column_group[w]).
// Python's _PlaneCells has the same fields.
struct PlaneCells {
  int64_t rows;
  int64_t columns;
  const int32_t* row_group;
  const int32_t* column_group;
  int32_t row_groups;
  int32_t column_groups;
};

// clip(round(x / scale), lowest, highest) * scale, in float32, halves to even. The bounds are whole numbers.
struct AffineRounding {
  float scale;
  float lowest;
  float highest;
};

// What a kernel works with between one plane and the next.
struct PlaneWork {
  const int32_t* column_order;   // the columns, those of one group next to each other
  const int32_t* column_starts;  // where in that order each group begins, and where the last one ends
  double* partial;               // 2 * row_groups * partial_stride
  int64_t partial_stride;        // the columns, filled up to whole vectors
};

// The kernels of one instruction set.
struct StatisticsKernels {
  // At least one element.
  Extremes (*extremes)(const float* x, int64_t n);

  // Adds to `counts`, which are bins.count times kHistogramCopies; equal values next to each other would otherwise
  // wait for each other. At most 2^31 elements at a time, all finite.
  void (*histogram)(const float* x, int64_t n, const Bins& bins, uint32_t* counts);

  // The sum of (round(clip(t)) - t)^2 for t = x * scale, codes of -half..half-1. In the first each difference is exact
  // for half up to 2^15 and t from 2^-126 to 2^24 (beyond, to 24 bits and at last Inf; below, to 2^-150, which no sum
  // notices that is not as small); the second, in float64, is for all others.
  double (*squared_error)(const float* x, int64_t n, float scale, float half);
  double (*squared_error_wide)(const float* x, int64_t n, double scale, double half);

  // The sums of every plane's cells, [planes, row_groups, column_groups], and those of the error of rounding, where
  // there is one. At least one element.
  void (*plane_sums)(const float* x, int64_t planes, const PlaneCells& cells, const PlaneWork& work,
                     const AffineRounding* rounding, double* sums, double* errors);
};

constexpr int64_t kHistogramCopies = 4;

namespace avx512 {
StatisticsKernels statistics_kernels();
}
namespace avx2 {
StatisticsKernels statistics_kernels();
}
namespace baseline {
StatisticsKernels statistics_kernels();
}

}  // namespace quark
