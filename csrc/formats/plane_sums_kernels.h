// The sums of a plane's cells, and of what rounding adds to the elements, in one pass and without an array of errors.
// Included after double_lanes.h and rounding_lanes.h by the per-ISA files only.
//
// A row is added, as doubles, to the partial sums of its group, column by column; at the end of the plane the columns
// of each group are added up. Where there is but one cell, a plane is a flat array.
#include "statistics.h"

namespace quark {
namespace QUARK_ISA {

// ---- what rounding adds to an element ----
struct NoError {
  static constexpr bool kIsWanted = false;
  QUARK_INLINE FloatsOf<kWidth> operator()(FloatsOf<kWidth> v) const { return v; }
};

struct AffineError {
  static constexpr bool kIsWanted = true;
  AffineRounding rounding;

  QUARK_INLINE FloatsOf<kWidth> operator()(FloatsOf<kWidth> v) const {
    const FloatsOf<kWidth> raised = maximum<kWidth>(v / rounding.scale, splat<kWidth>(rounding.lowest));
    const FloatsOf<kWidth> clipped = minimum<kWidth>(raised, splat<kWidth>(rounding.highest));
    return round_half_even(clipped) * rounding.scale - v;
  }
};

// ---- sums ----
// kWidth elements, of which those beyond `available` are made up.
QUARK_INLINE FloatsOf<kWidth> load_within(const float* p, int64_t available) {
  if (__builtin_expect(available >= kWidth, 1)) return load<kWidth>(p);
  return load<kWidth>(Tail<kWidth>(p, available, 0.0f).values);
}

QUARK_INLINE FloatsOf<kWidth> keep_lanes(FloatsOf<kWidth> v, int64_t count) {
  IntsOf<kWidth> lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(count) ? v : splat<kWidth>(0.0f);
}

QUARK_INLINE void add_to(DoublePair& sum, FloatsOf<kWidth> v) {
  const DoublePair wide = widen(v);
  sum.low += wide.low;
  sum.high += wide.high;
}

QUARK_INLINE void add_to(double* sums, Doubles v) {
  Doubles sum;
  std::memcpy(&sum, sums, sizeof sum);
  sum += v;
  std::memcpy(sums, &sum, sizeof sum);
}

QUARK_INLINE void add_to(double* sums, FloatsOf<kWidth> v) {
  const DoublePair wide = widen(v);
  add_to(sums, wide.low);
  add_to(sums + kHalfWidth, wide.high);
}

// Of `available` elements, at least n, the first n.
template <class Error>
QUARK_INLINE void flat_sum(const float* x, int64_t n, int64_t available, const Error& error_of, double* sum,
                           double* error) {
  DoublePair sums{}, errors{};
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    prefetch(x + i, 512);
    const FloatsOf<kWidth> v = load<kWidth>(x + i);
    add_to(sums, v);
    if (Error::kIsWanted) add_to(errors, error_of(v));
  }
  if (i < n) {
    const FloatsOf<kWidth> v = load_within(x + i, available - i);
    add_to(sums, keep_lanes(v, n - i));
    if (Error::kIsWanted) add_to(errors, keep_lanes(error_of(v), n - i));
  }
  *sum = sum_of(sums.low + sums.high);
  if (Error::kIsWanted) *error = sum_of(errors.low + errors.high);
}

// What a row's last vector reads beyond it goes to partial sums that belong to no column.
template <class Error>
QUARK_INLINE void add_row(const float* x, int64_t columns, int64_t available, const Error& error_of, double* sums,
                          double* errors) {
  for (int64_t w = 0; w < columns; w += kWidth) {
    prefetch(x + w, 512);
    const FloatsOf<kWidth> v = load_within(x + w, available - w);
    add_to(sums + w, v);
    if (Error::kIsWanted) add_to(errors + w, error_of(v));
  }
}

QUARK_INLINE void add_columns(const double* partial, const PlaneCells& cells, const PlaneWork& work, double* sums) {
  for (int32_t q = 0; q < cells.column_groups; ++q) {
    double sum = 0;
    for (int32_t i = work.column_starts[q]; i < work.column_starts[q + 1]; ++i) sum += partial[work.column_order[i]];
    sums[q] = sum;
  }
}

template <class Error>
QUARK_INLINE void cell_sums(const float* x, int64_t available, const PlaneCells& cells, const PlaneWork& work,
                            const Error& error_of, double* sums, double* errors) {
  const int64_t stride = work.partial_stride;
  const int64_t size = stride * cells.row_groups;
  double* const partial_errors = work.partial + size;
  std::memset(work.partial, 0, static_cast<size_t>(Error::kIsWanted ? 2 * size : size) * sizeof(double));
  for (int64_t h = 0; h < cells.rows; ++h) {
    const int64_t start = stride * cells.row_group[h];
    const int64_t before = h * cells.columns;
    add_row(x + before, cells.columns, available - before, error_of, work.partial + start, partial_errors + start);
  }
  for (int64_t p = 0; p < cells.row_groups; ++p) {
    add_columns(work.partial + p * stride, cells, work, sums + p * cells.column_groups);
    if (Error::kIsWanted) add_columns(partial_errors + p * stride, cells, work, errors + p * cells.column_groups);
  }
}

template <class Error>
void all_planes(const float* x, int64_t planes, const PlaneCells& cells, const PlaneWork& work, const Error& error_of,
                double* sums, double* errors) {
  const int64_t size = cells.rows * cells.columns;
  const int64_t found = int64_t{cells.row_groups} * cells.column_groups;
  for (int64_t i = 0; i < planes; ++i) {
    const float* const plane = x + i * size;
    const int64_t available = (planes - i) * size;
    double* const to = sums + i * found;
    double* const errors_to = Error::kIsWanted ? errors + i * found : nullptr;
    if (found == 1) {
      flat_sum(plane, size, available, error_of, to, errors_to);
    } else {
      cell_sums(plane, available, cells, work, error_of, to, errors_to);
    }
  }
}

inline void plane_sums(const float* x, int64_t planes, const PlaneCells& cells, const PlaneWork& work,
                       const AffineRounding* rounding, double* sums, double* errors) {
  if (rounding == nullptr) return all_planes(x, planes, cells, work, NoError{}, sums, errors);
  all_planes(x, planes, cells, work, AffineError{*rounding}, sums, errors);
}

}  // namespace QUARK_ISA
}  // namespace quark
