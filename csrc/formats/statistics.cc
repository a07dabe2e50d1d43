// The statistics that Python calls, by the best instruction set of this processor. A caller with several threads calls
// from each of them: nothing here is shared.
#include "statistics.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "../ort_abi.h"
#include "block_job.h"
#include "denormals.h"

using namespace quark;

namespace {

constexpr int64_t kHistogramBlock = int64_t{1} << 30;  // counts of 32 bits cannot overflow
constexpr int64_t kErrorBlock = 1 << 12;               // stays in the first-level cache for all positions
constexpr int64_t kMaxBins = int64_t{1} << 24;
constexpr int32_t kMaxExactBits = 16;
constexpr int32_t kMaxExactPosition = 100;
constexpr int64_t kLargestVector = 16;  // floats, of any instruction set
constexpr int32_t kMaxPosition = 300;  // (x * 2^position)^2 of every float32 x, and sums of them, are normal float64

StatisticsKernels choose_kernels() {
#if defined(QUARK_WIDE_KERNELS)
  if (std::strcmp(best_instruction_set(), "avx512") == 0) return avx512::statistics_kernels();
  if (std::strcmp(best_instruction_set(), "avx2") == 0) return avx2::statistics_kernels();
#endif
  return baseline::statistics_kernels();
}

const StatisticsKernels& kernels() {
  static const StatisticsKernels chosen = choose_kernels();
  return chosen;
}

double error_at(const float* x, int64_t n, int32_t bits, int32_t position) {
  const double half = std::ldexp(1.0, bits - 1);
  const double scale = std::ldexp(1.0, position);
  if (bits <= kMaxExactBits && std::abs(position) <= kMaxExactPosition) {
    const double sum = kernels().squared_error(x, n, static_cast<float>(scale), static_cast<float>(half));
    if (std::isfinite(sum)) return sum;  // else there is a number of steps, perhaps of a finite x, beyond float32
  }
  return kernels().squared_error_wide(x, n, scale, half);
}

bool is_within(const int32_t* groups, int64_t count, int32_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    if (groups[i] < 0 || groups[i] >= limit) return false;
  }
  return true;
}

// Groups at most as many as there are lines, and every line in one of them.
bool is_valid(const PlaneCells& cells) {
  if (cells.rows < 1 || cells.columns < 1 || cells.rows > INT32_MAX || cells.columns > INT32_MAX) return false;
  if (cells.row_groups > cells.rows || cells.column_groups > cells.columns) return false;
  return is_within(cells.row_group, cells.rows, cells.row_groups) &&
         is_within(cells.column_group, cells.columns, cells.column_groups);
}

// The columns by group into `order`, and where each group begins into `starts`, which has one more.
void sort_columns(const PlaneCells& cells, int32_t* order, int32_t* starts) {
  std::memset(starts, 0, static_cast<size_t>(cells.column_groups + 1) * sizeof(int32_t));
  for (int64_t w = 0; w < cells.columns; ++w) ++starts[cells.column_group[w]];
  for (int32_t group = 1; group <= cells.column_groups; ++group) starts[group] += starts[group - 1];
  for (int64_t w = cells.columns - 1; w >= 0; --w) order[--starts[cells.column_group[w]]] = static_cast<int32_t>(w);
}

}  // namespace

// The least and the greatest element into found[0] and found[1]; 1 when there are none, or NaN or Inf among them.
extern "C" QUARK_EXPORT int quark_extremes(const float* x, int64_t n, float* found) {
  if (n < 1) return 1;
  const KeepDenormals keep;
  const Extremes extremes = kernels().extremes(x, n);
  found[0] = extremes.lowest;
  found[1] = extremes.highest;
  return extremes.is_finite ? 0 : 1;
}

// Adds finite elements to `counts`, of evenly spaced bins. 1 for numbers out of range, 2 for want of memory.
extern "C" QUARK_EXPORT int quark_add_to_histogram(const float* x, int64_t n, double lowest, double per_unit,
                                                   int64_t* counts, int64_t count) {
  if (n < 0 || count < 1 || count > kMaxBins) return 1;
  const KeepDenormals keep;
  const Bins bins{lowest, per_unit, static_cast<int32_t>(count)};
  const std::unique_ptr<uint32_t[]> copies(new (std::nothrow) uint32_t[static_cast<size_t>(count * kHistogramCopies)]);
  if (copies == nullptr) return 2;
  for (int64_t start = 0; start < n; start += kHistogramBlock) {
    std::memset(copies.get(), 0, static_cast<size_t>(count * kHistogramCopies) * sizeof(uint32_t));
    kernels().histogram(x + start, n - start < kHistogramBlock ? n - start : kHistogramBlock, bins, copies.get());
    for (int64_t k = 0; k < kHistogramCopies; ++k) {
      for (int64_t i = 0; i < count; ++i) counts[i] += copies[static_cast<size_t>(k * count + i)];
    }
  }
  return 0;
}

// Adds to sums[i] the sum of (x_hat - x)^2 at positions[i], for codes of so many bits: NaN or Inf only where x holds
// them. 1 for numbers out of range.
extern "C" QUARK_EXPORT int quark_add_squared_errors(const float* x, int64_t n, int32_t bits, const int32_t* positions,
                                                     int32_t count, double* sums) {
  if (n < 0 || bits < 2 || bits > 32 || count < 0) return 1;
  for (int32_t i = 0; i < count; ++i) {
    if (positions[i] < -kMaxPosition || positions[i] > kMaxPosition) return 1;
  }
  const KeepDenormals keep;
  for (int64_t start = 0; start < n; start += kErrorBlock) {
    const int64_t length = n - start < kErrorBlock ? n - start : kErrorBlock;
    for (int32_t i = 0; i < count; ++i) {
      sums[i] += std::ldexp(error_at(x + start, length, bits, positions[i]), -2 * positions[i]);
    }
  }
  return 0;
}

// The sums of the cells of every plane, [planes, row_groups, column_groups], and, unless `rounding` is null, those of
// what rounding adds to each element. 1 for numbers out of range, 2 for want of memory.
extern "C" QUARK_EXPORT int quark_plane_sums(const float* x, int64_t planes, const PlaneCells* cells,
                                             const AffineRounding* rounding, double* sums, double* errors) {
  if (planes < 0 || !is_valid(*cells)) return 1;
  const KeepDenormals keep;
  const int64_t stride = (cells->columns + kLargestVector - 1) / kLargestVector * kLargestVector;
  const size_t length = static_cast<size_t>(2 * stride * cells->row_groups);
  const std::unique_ptr<double[]> partial(new (std::nothrow) double[length + kLargestVector]);
  const std::unique_ptr<int32_t[]> order(
      new (std::nothrow) int32_t[static_cast<size_t>(cells->columns + cells->column_groups + 1)]);
  if (partial == nullptr || order == nullptr) return 2;
  int32_t* const starts = order.get() + cells->columns;
  sort_columns(*cells, order.get(), starts);
  void* aligned = partial.get();  // to lines of the cache, which a vector then never straddles
  size_t space = (length + kLargestVector) * sizeof(double);
  std::align(64, length * sizeof(double), aligned, space);
  const PlaneWork work{order.get(), starts, static_cast<double*>(aligned), stride};
  kernels().plane_sums(x, planes, *cells, work, rounding, sums, errors);
  return 0;
}
