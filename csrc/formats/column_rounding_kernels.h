// The rounding of columns, in loops over outputs that the compiler turns into vectors. Included after lanes.h by the
// per-ISA files only. Every operation is rounded as numpy's is, so the results are equal to the bit.
#include <vector>

#include "block_job.h"
#include "column_rounding.h"

namespace quark {
namespace QUARK_ISA {

constexpr int64_t kOutputs = 128;  // at a time, so that all columns of a piece stay in the first cache

QUARK_INLINE double within(double v, double lowest, double highest) {
  v = v < lowest ? lowest : v;
  return v > highest ? highest : v;
}

// The nearest integer times the scale, halves to even. Adding 1.5 * 2^52 leaves no bits for a fraction.
QUARK_INLINE double rounded(double v, double scale, double zero_point, double lowest, double highest) {
  constexpr double kFar = 1099511627776.0, kWhole = 6755399441055744.0;  // 2^40 is beyond all codes
  const double nearest = (within(v / scale, -kFar, kFar) + kWhole) - kWhole;
  return (within(nearest + zero_point, lowest, highest) - zero_point) * scale;
}

template <bool kIsDescent>
void round_outputs(const ColumnRounding& r, int64_t first, int64_t count) {
  double errors[kOutputs];
  for (int64_t column = 0; column < r.columns; ++column) {
    const int64_t place = column * r.outputs + first;
    const double* const scale = r.scale + place;
    const double* const zero_point = r.zero_point + place;
    double* const values = r.values + place;
    double* const result = r.result + place;
    const double divisor = r.divisor[column], lowest = r.lowest, highest = r.highest;
    if constexpr (kIsDescent) {
      const double* const before = r.before + place;
#pragma GCC ivdep
      for (int64_t o = 0; o < count; ++o) {
        const double aim = before[o] + values[o] / divisor;
        result[o] = rounded(aim, scale[o], zero_point[o], lowest, highest);
        errors[o] = result[o] - before[o];
      }
    } else {
#pragma GCC ivdep
      for (int64_t o = 0; o < count; ++o) {
        errors[o] = (values[o] - rounded(values[o], scale[o], zero_point[o], lowest, highest)) / divisor;
        result[o] = errors[o];
      }
    }
    for (int64_t other = column + 1; other < r.columns; ++other) {
      const double factor = r.factors[column * r.columns + other];
      double* const changed = r.values + other * r.outputs + first;
#pragma GCC ivdep
      for (int64_t o = 0; o < count; ++o) changed[o] -= factor * errors[o];
    }
  }
}

// Columns that are one block: its scale is that of the values that they have when a column has its turn.
void round_block(const ColumnRounding& r, int64_t first, int64_t count, float* values32, float* rounded32) {
  double errors[kOutputs];
  const Geometry geometry{1, r.columns, count};
  const BlockJob job = make_block_job(values32, rounded32, Storage::kFloat32, geometry, *r.block);
  for (int64_t column = 0; column < r.columns; ++column) {
    const double* const source = r.values + column * r.outputs + first;
#pragma GCC ivdep
    for (int64_t o = 0; o < count; ++o) values32[column * count + o] = static_cast<float>(source[o]);
  }
  for (int64_t column = 0; column < r.columns; ++column) {
    const double* const values = r.values + column * r.outputs + first;
    double* const result = r.result + column * r.outputs + first;
    const float* const rounded = rounded32 + column * count;
    const double divisor = r.divisor[column];
    run_chunks(job, 0, job.chunks);
#pragma GCC ivdep
    for (int64_t o = 0; o < count; ++o) {
      errors[o] = (values[o] - static_cast<double>(rounded[o])) / divisor;
      result[o] = errors[o];
    }
    for (int64_t other = column + 1; other < r.columns; ++other) {
      const double factor = r.factors[column * r.columns + other];
      double* const changed = r.values + other * r.outputs + first;
      float* const changed32 = values32 + other * count;
#pragma GCC ivdep
      for (int64_t o = 0; o < count; ++o) {
        changed[o] -= factor * errors[o];
        changed32[o] = static_cast<float>(changed[o]);
      }
    }
  }
}

RoundColumns column_rounding_kernel() {
  return [](const ColumnRounding& r) {
    if (r.block != nullptr) {
      std::vector<float> workspace(static_cast<size_t>(2 * r.columns * kOutputs));
      float* const rounded = workspace.data() + r.columns * kOutputs;
      for (int64_t first = 0; first < r.outputs; first += kOutputs) {
        const int64_t count = r.outputs - first < kOutputs ? r.outputs - first : kOutputs;
        round_block(r, first, count, workspace.data(), rounded);
      }
      return;
    }
    for (int64_t first = 0; first < r.outputs; first += kOutputs) {
      const int64_t count = r.outputs - first < kOutputs ? r.outputs - first : kOutputs;
      r.before == nullptr ? round_outputs<false>(r, first, count) : round_outputs<true>(r, first, count);
    }
  };
}

}  // namespace QUARK_ISA
}  // namespace quark
