// Sums of products of rows, in vectors of kWidth floats. Included by the per-ISA files only, after lanes.h,
// rounding_lanes.h and exponential_lanes.h.
//
// Columns are in panels of V vectors. A tile is a few columns of the left matrix times one panel of the right one; its
// sums stay in registers over all rows, and are then added to those in memory.
#include "row_products.h"

namespace quark {
namespace QUARK_ISA {

typedef FloatsOf<kWidth> Vector;

constexpr int kTileColumns = kWidth == 16 ? 8 : 4;  // of the left matrix: as many as the registers allow

// The value of an element's code, as AffineError has it.
QUARK_INLINE Vector rounded(const AffineRounding& rounding, Vector v) {
  const Vector raised = maximum<kWidth>(v / rounding.scale, splat<kWidth>(rounding.lowest));
  return round_half_even(minimum<kWidth>(raised, splat<kWidth>(rounding.highest))) * rounding.scale;
}

// One group's columns, panel by panel, with zeros behind the last column.
template <int V>
void pack(const RowProducts& p, const float* rows, const AffineRounding* rounding, float* packed) {
  constexpr int64_t kPanel = V * kWidth;
  for (int64_t first = 0; first < p.columns; first += kPanel) {
    const int64_t width = p.columns - first < kPanel ? p.columns - first : kPanel;
    for (int64_t row = 0; row < p.rows; ++row, packed += kPanel) {
      const float* const source = rows + row * p.groups * p.columns + first;
      for (int64_t c = 0; c < kPanel; ++c) packed[c] = c < width ? source[c] : 0.0f;  // stays 0 if rounded
      for (int v = 0; v < V && rounding != nullptr; ++v) {
        store<kWidth>(packed + v * kWidth, rounded(*rounding, load<kWidth>(packed + v * kWidth)));
      }
    }
  }
}

// `height` by `width` of the tile count; `sums` begins at its first number.
template <int V>
QUARK_INLINE void add_tile(const RowProducts& p, const float* left, const float* right, float* sums, int64_t height,
                           int64_t width) {
  constexpr int64_t kPanel = V * kWidth;
  Vector totals[kTileColumns][V] = {};
  for (int64_t row = 0; row < p.rows; ++row, left += kPanel, right += kPanel) {
    Vector b[V];
    for (int v = 0; v < V; ++v) b[v] = load<kWidth>(right + v * kWidth);
    for (int i = 0; i < kTileColumns; ++i) {
      const Vector a = left[i] - Vector{};  // splat would add to zero, which costs an instruction
      for (int v = 0; v < V; ++v) totals[i][v] = fused(a, b[v], totals[i][v]);
    }
  }
  for (int64_t i = 0; i < height; ++i) {
    float line[kPanel];
    for (int v = 0; v < V; ++v) store<kWidth>(line + v * kWidth, totals[i][v]);
    for (int64_t c = 0; c < width; ++c) sums[i * p.columns + c] += line[c];
  }
}

// left' right, added to `sums`. Where `is_symmetric`, tiles that are wholly left of the diagonal are left out.
template <int V>
void add_products(const RowProducts& p, const float* left, const float* right, float* sums, bool is_symmetric) {
  constexpr int64_t kPanel = V * kWidth;
  for (int64_t column = 0; column < p.columns; column += kPanel) {
    const int64_t width = p.columns - column < kPanel ? p.columns - column : kPanel;
    const int64_t last = is_symmetric ? column + width : p.columns;
    for (int64_t i = 0; i < last; i += kTileColumns) {
      const int64_t height = p.columns - i < kTileColumns ? p.columns - i : kTileColumns;
      add_tile<V>(p, left + i / kPanel * kPanel * p.rows + i % kPanel, right + column * p.rows,
                  sums + i * p.columns + column, height, width);
    }
  }
}

template <int V>
void add_all(const RowProducts& p, float* workspace) {
  float* const own = workspace;
  float* const exact = workspace + p.rows * (p.columns + kMostPanelColumns);
  static_assert(V * kWidth <= kMostPanelColumns, "a panel fits behind the last column");
  for (int64_t group = 0; group < p.groups; ++group) {
    const int64_t place = group * p.columns * p.columns;
    pack<V>(p, p.own + group * p.columns, p.rounding, own);
    add_products<V>(p, own, own, p.inner + place, true);
    if (p.exact == nullptr) continue;
    pack<V>(p, p.exact + group * p.columns, nullptr, exact);
    add_products<V>(p, exact, own, p.cross + place, false);
  }
}

AddRowProducts row_products_kernel() {
  return [](const RowProducts& p, float* workspace) {
    p.columns <= kWidth ? add_all<1>(p, workspace) : add_all<2>(p, workspace);
  };
}

}  // namespace QUARK_ISA
}  // namespace quark
