// How the inputs of a layer vary together: sums of the products of all pairs of columns over rows, as
// src/quark/features/compensation/input_products.py defines them.
#pragma once

#include <cstdint>

#include "statistics.h"

namespace quark {

// Python's _RowProducts has the same fields. Rows are [rows, groups, columns], sums [groups, columns, columns].
struct RowProducts {
  int64_t rows;
  int64_t groups;
  int64_t columns;
  const float* own;    // rounded inputs z, or inputs that are rounded on the way
  const float* exact;  // float inputs x; null if there are no cross products
  float* inner;        // z z' is added to it, from the diagonal to the right only
  float* cross;        // x z' is added to it
  const AffineRounding* rounding;  // of `own`; null if it is rounded, or stays in float
};

// Floats of working memory that the kernels need: two matrices of one group, filled up to whole vectors.
constexpr int64_t kMostPanelColumns = 32;
inline int64_t row_products_workspace(const RowProducts& p) { return 2 * p.rows * (p.columns + kMostPanelColumns); }

// The kernel of one instruction set.
typedef void (*AddRowProducts)(const RowProducts& products, float* workspace);

namespace avx512 {
AddRowProducts row_products_kernel();
}
namespace avx2 {
AddRowProducts row_products_kernel();
}
namespace baseline {
AddRowProducts row_products_kernel();
}

}  // namespace quark
