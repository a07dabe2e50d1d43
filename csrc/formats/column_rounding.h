// Columns of a weight matrix that are rounded one after the other, to integers times a scale or as a block of a block
// format, as src/quark/features/compensation/rounding.py defines it.
#pragma once

#include <cstdint>

#include "block_parameters.h"

namespace quark {

// Python's _ColumnRounding has the same fields. Matrices are [columns, outputs], `factors` [columns, columns].
struct ColumnRounding {
  int64_t columns;
  int64_t outputs;
  const double* scale;       // null for a block
  const double* zero_point;  // likewise
  double lowest;          // codes
  double highest;
  const double* factors;  // by which the columns to the right of a column are changed for its error
  const double* divisor;  // of each column
  const double* before;   // null for compensation; for descent the rounded values
  double* values;         // compensation: the columns, which are changed; descent: the pull on them, likewise
  double* result;         // compensation: errors over the divisor; descent: the new values
  const BlockParameters* block;  // the format of which all columns are one block; null for integers
};

// The kernel of one instruction set.
typedef void (*RoundColumns)(const ColumnRounding& rounding);

namespace avx512 {
RoundColumns column_rounding_kernel();
}
namespace avx2 {
RoundColumns column_rounding_kernel();
}
namespace baseline {
RoundColumns column_rounding_kernel();
}

}  // namespace quark
