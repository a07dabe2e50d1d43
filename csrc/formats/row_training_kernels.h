// Iterations of finetuning, in vectors of kWidth floats. Included by the per-ISA files only, after
// weight_step_kernels.h.
#include "row_training.h"

namespace quark {
namespace QUARK_ISA {

// ---- products of matrices ----

constexpr int kTileRows = kWidth == 16 ? 8 : 4;  // with kTileVectors: as many sums as the registers hold
constexpr int kTileVectors = 3;
constexpr int64_t kDepth = 192;  // terms of a sum at a time: that many lines of a panel stay in the cache

// c[i, j] += sum over l of a[i, l] * b[l, j]; lines of b and c are contiguous.
struct Product {
  const float* a;
  int64_t a_row, a_column;
  const float* b;
  int64_t b_row;
  float* c;
  int64_t c_row;
  int64_t rows, columns, depth;
};

template <int H, int V>
QUARK_INLINE void add_tile(const Product& p, const float* a, const float* b, float* c, int64_t depth) {
  Vector totals[H][V];
  for (int i = 0; i < H; ++i) {
    for (int v = 0; v < V; ++v) totals[i][v] = load<kWidth>(c + i * p.c_row + v * kWidth);
  }
  for (int64_t l = 0; l < depth; ++l, a += p.a_column, b += p.b_row) {
    Vector line[V];
    for (int v = 0; v < V; ++v) line[v] = load<kWidth>(b + v * kWidth);
    for (int i = 0; i < H; ++i) {
      const Vector factor = splat<kWidth>(a[i * p.a_row]);
      for (int v = 0; v < V; ++v) totals[i][v] = fused(factor, line[v], totals[i][v]);
    }
  }
  for (int i = 0; i < H; ++i) {
    for (int v = 0; v < V; ++v) store<kWidth>(c + i * p.c_row + v * kWidth, totals[i][v]);
  }
}

template <int V>
QUARK_NOINLINE void add_panel(const Product& p, int64_t column, int64_t first, int64_t depth) {
  const float* const b = p.b + first * p.b_row + column;
  const float* a = p.a + first * p.a_column;
  float* c = p.c + column;
  int64_t i = 0;
  for (; i + kTileRows <= p.rows; i += kTileRows, a += kTileRows * p.a_row, c += kTileRows * p.c_row) {
    add_tile<kTileRows, V>(p, a, b, c, depth);
  }
  for (; i + 2 <= p.rows; i += 2, a += 2 * p.a_row, c += 2 * p.c_row) add_tile<2, V>(p, a, b, c, depth);
  if (i < p.rows) add_tile<1, V>(p, a, b, c, depth);
}

// Whole vectors of columns only.
inline void add_whole_columns(const Product& p) {
  for (int64_t first = 0; first < p.depth; first += kDepth) {
    const int64_t depth = p.depth - first < kDepth ? p.depth - first : kDepth;
    int64_t column = 0;
    for (; column + kTileVectors * kWidth <= p.columns; column += kTileVectors * kWidth) {
      add_panel<kTileVectors>(p, column, first, depth);
    }
    if (column + 2 * kWidth <= p.columns) {
      add_panel<2>(p, column, first, depth);
      column += 2 * kWidth;
    }
    if (column + kWidth <= p.columns) add_panel<1>(p, column, first, depth);
  }
}

// `workspace` has room for depth + rows vectors: the columns behind the last whole vector go through it.
inline void add_product(const Product& p, float* workspace) {
  Product whole = p;
  whole.columns = p.columns / kWidth * kWidth;
  add_whole_columns(whole);
  const int64_t rest = p.columns - whole.columns;
  if (rest == 0) return;
  float* const b = workspace;
  float* const c = workspace + p.depth * kWidth;
  const auto copy = [rest](const float* from, int64_t from_row, float* to, int64_t to_row, int64_t count) {
    for (int64_t line = 0; line < count; ++line) {
      for (int64_t j = 0; j < rest; ++j) to[line * to_row + j] = from[line * from_row + j];
    }
  };
  for (int64_t i = 0; i < (p.depth + p.rows) * kWidth; ++i) workspace[i] = 0.0f;
  copy(p.b + whole.columns, p.b_row, b, kWidth, p.depth);
  copy(p.c + whole.columns, p.c_row, c, kWidth, p.rows);
  add_whole_columns({p.a, p.a_row, p.a_column, b, kWidth, c, kWidth, p.rows, kWidth, p.depth});
  copy(c, kWidth, p.c + whole.columns, p.c_row, p.rows);
}

// ---- the error of outputs ----

constexpr float kUnbounded = __builtin_inff();

template <int W>
struct BoundsOf {
  FloatsOf<W> low, high;

  QUARK_INLINE BoundsOf(const RowTraining& t, int64_t column)
      : low(t.lowest == nullptr ? splat<W>(-kUnbounded) : load<W>(t.lowest + column)),
        high(t.highest == nullptr ? splat<W>(kUnbounded) : load<W>(t.highest + column)) {}

  QUARK_INLINE FloatsOf<W> behind(FloatsOf<W> value) const { return minimum<W>(high, maximum<W>(low, value)); }

  // The error behind the bounds, of outputs of one row.
  QUARK_INLINE FloatsOf<W> distance(FloatsOf<W> value, FloatsOf<W> target) const {
    return behind(value) - behind(target);
  }

  // The gradient of its square, but for a factor.
  QUARK_INLINE FloatsOf<W> error(FloatsOf<W> value, FloatsOf<W> target) const {
    const FloatsOf<W> bounded = behind(value);
    return bounded == value ? bounded - behind(target) : FloatsOf<W>{};
  }
};

template <int W>
QUARK_INLINE void add_squares(FloatsOf<W> distance, double* squares) {
  if constexpr (W == 1) {
    squares[0] += static_cast<double>(distance) * static_cast<double>(distance);
  } else {
    for (int lane = 0; lane < W; ++lane) {
      squares[lane] += static_cast<double>(distance[lane]) * static_cast<double>(distance[lane]);
    }
  }
}

// W columns of all rows, in place: `values` and `targets` begin at the first of them, number `column` of all. Sums are
// those of 16 rows each, added up in their order.
template <int W>
void column_errors(const RowTraining& t, float* values, const float* targets, int64_t column, int64_t rows, float* sums,
                   double* squares) {
  const BoundsOf<W> bounds(t, column);
  FloatsOf<W> total{};
  for (int64_t start = 0; start < rows; start += 16) {
    FloatsOf<W> sum{};
    for (int64_t row = start; row < rows && row < start + 16; ++row) {
      float* const value = values + row * t.outputs;
      const FloatsOf<W> target = load<W>(targets + row * t.target_row);
      if (squares != nullptr) {
        add_squares<W>(bounds.distance(load<W>(value), target), squares + column);
        continue;
      }
      const FloatsOf<W> error = bounds.error(load<W>(value), target);
      store<W>(value, error);
      sum += error;
    }
    total += sum;
  }
  if (squares == nullptr) store<W>(sums + column, load<W>(sums + column) + total);
}

// ---- columns with inputs of their own ----

constexpr int64_t kOwnColumns = 8 * kWidth;  // at a time: long enough runs of memory, and sums that stay in the cache

// W neighbouring columns of a row: what they add to the gradient of the weights and, `sums`, of the bias. With
// `squares`, what they add to the squared errors instead.
template <int W>
QUARK_INLINE void own_columns(const RowTraining& t, const float* bias, int64_t row, int64_t column, float* of_weights,
                              float* sums, double* squares) {
  const BoundsOf<W> bounds(t, column);
  const float* const inputs = t.inputs + row * t.input_row + column;
  const float* const weights = t.weights.weights + column;
  FloatsOf<W> value = load<W>(bias + column);
  for (int64_t k = 0; k < t.length; ++k) value += load<W>(inputs + k * t.input_column) * load<W>(weights + k * t.outputs);
  const FloatsOf<W> target = load<W>(t.targets + row * t.target_row + column);
  if (squares != nullptr) {
    return add_squares<W>(bounds.distance(value, target), squares + column);
  }
  const FloatsOf<W> error = bounds.error(value, target);
  store<W>(sums + column, load<W>(sums + column) + error);
  for (int64_t k = 0; k < t.length; ++k) {
    float* const place = of_weights + k * t.outputs + column;
    store<W>(place, load<W>(place) + load<W>(inputs + k * t.input_column) * error);
  }
}

inline void see_own_columns(const RowTraining& t, const float* bias, int64_t start, int64_t rows, float* of_weights,
                            float* sums, double* squares) {
  for (int64_t first = 0; first < t.outputs; first += kOwnColumns) {
    const int64_t end = first + kOwnColumns < t.outputs ? first + kOwnColumns : t.outputs;
    for (int64_t row = start; row < start + rows; ++row) {
      int64_t o = first;
      for (; o + kWidth <= end; o += kWidth) own_columns<kWidth>(t, bias, row, o, of_weights, sums, squares);
      for (; o < end; ++o) own_columns<1>(t, bias, row, o, of_weights, sums, squares);
    }
  }
}

// ---- iterations ----

// The parts of the workspace.
struct Rooms {
  float *values, *of_weights, *moved, *bias, *of_bias, *rest;

  explicit Rooms(const RowTraining& t) {
    const int64_t rows = t.rows > t.length + 1 ? t.rows : t.length + 1;
    values = t.workspace;
    of_weights = values + t.groups * rows * t.outputs;
    moved = of_weights + t.groups * (t.length + 1) * t.outputs;
    bias = moved + t.groups * (t.length + 1) * t.outputs;
    of_bias = bias + t.groups * t.outputs;
    rest = of_bias + t.groups * t.outputs;
  }
};

// The bias that is added.
inline const float* rounded_bias(const RowTraining& t, float* room) {
  if (t.bias_scale == nullptr) return t.bias;
  for (int64_t i = 0; i < t.groups * t.outputs; ++i) {
    const float level = round_half_even(splat<kWidth>(t.bias[i] / t.bias_scale[i]))[0];
    const float above = level > t.bias_lowest[i] ? level : t.bias_lowest[i];
    room[i] = (above < t.bias_highest[i] ? above : t.bias_highest[i]) * t.bias_scale[i];
  }
  return room;
}

// The gradient of a batch is added to `of_weights` and `of_bias`; or, with `squares`, the errors to those.
inline void see_rows(const RowTraining& t, const Rooms& rooms, const float* bias, int64_t start, int64_t rows,
                     double* squares) {
  const float* const weights = t.weights.weights;
  if (t.has_own_inputs != 0) return see_own_columns(t, bias, start, rows, rooms.of_weights, rooms.of_bias, squares);
  for (int64_t group = 0; group < t.groups; ++group) {
    const int64_t place = group * t.outputs, of_group = group * t.length * t.outputs;
    float* const values = rooms.values + group * rows * t.outputs;
    const float* const inputs = t.inputs + group * t.input_group + start * t.input_row;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t o = 0; o < t.outputs; ++o) values[row * t.outputs + o] = bias[place + o];
    }
    add_product({inputs, t.input_row, 1, weights + of_group, t.outputs, values, t.outputs, rows, t.outputs, t.length},
                rooms.rest);
    const float* const targets = t.targets + group * t.target_group + start * t.target_row;
    int64_t o = 0;
    for (; o + kWidth <= t.outputs; o += kWidth) {
      column_errors<kWidth>(t, values + o, targets + o, place + o, rows, rooms.of_bias, squares);
    }
    for (; o < t.outputs; ++o) column_errors<1>(t, values + o, targets + o, place + o, rows, rooms.of_bias, squares);
    if (squares != nullptr) continue;
    add_product({inputs, 1, t.input_row, values, t.outputs, rooms.of_weights + of_group, t.outputs, t.length,
                 t.outputs, rows},
                rooms.rest);
  }
}

// The gradient from a Gram matrix, whose last row and column are the bias's.
inline void see_gram(const RowTraining& t, const Rooms& rooms, const float* bias) {
  const int64_t depth = t.length + 1, numbers = depth * t.outputs;
  for (int64_t group = 0; group < t.groups; ++group) {
    const float* const weights = t.weights.weights + group * t.length * t.outputs;
    const float* const origin = t.origin + group * numbers;
    const float* const cross = t.cross + group * numbers;
    float* const product = rooms.values;
    for (int64_t i = 0; i < t.length * t.outputs; ++i) rooms.moved[i] = weights[i] - origin[i];
    for (int64_t o = 0; o < t.outputs; ++o) {
      const int64_t i = t.length * t.outputs + o;
      rooms.moved[i] = bias[group * t.outputs + o] - origin[i];
    }
    for (int64_t i = 0; i < numbers; ++i) product[i] = -cross[i];
    add_product({t.inputs + group * t.input_group, t.input_row, 1, rooms.moved, t.outputs, product, t.outputs, depth,
                 t.outputs, depth},
                rooms.rest);
    std::memcpy(rooms.of_weights + group * t.length * t.outputs, product,
                static_cast<size_t>(t.length * t.outputs) * sizeof(float));
    std::memcpy(rooms.of_bias + group * t.outputs, product + t.length * t.outputs,
                static_cast<size_t>(t.outputs) * sizeof(float));
  }
}

inline void train_rows(const RowTraining& t, const RowIteration* iterations, const int64_t* starts, int64_t count) {
  const Rooms rooms(t);
  WeightStep weights = t.weights, of_bias = t.bias_step;
  weights.gradient = rooms.of_weights;
  of_bias.gradient = rooms.of_bias;
  const bool is_gram = t.targets == nullptr;
  for (int64_t iteration = 0; iteration < count; ++iteration) {
    const RowIteration& now = iterations[iteration];
    const float* const bias = rounded_bias(t, rooms.bias);
    if (is_gram) {
      see_gram(t, rooms, bias);
    } else {
      const int64_t numbers = t.groups * t.length * t.outputs;
      std::memset(rooms.of_weights, 0, static_cast<size_t>(numbers) * sizeof(float));
      std::memset(rooms.of_bias, 0, static_cast<size_t>(t.groups * t.outputs) * sizeof(float));
      for (int64_t batch = 0; batch < t.batches; ++batch) {
        const int64_t start = starts[iteration * t.batches + batch];
        see_rows(t, rooms, bias, start, t.count - start < t.rows ? t.count - start : t.rows, nullptr);
      }
    }
    weights.step_size = now.weight_step_size;
    weights.exponent = now.exponent;
    weights.regularization = now.regularization;
    of_bias.step_size = now.bias_step_size;
    weights.root = of_bias.root = now.root;
    weight_step(weights);
    if (of_bias.count > 0) weight_step(of_bias);
  }
}

inline void row_errors(const RowTraining& t, int64_t count, double* squares) {
  const Rooms rooms(t);
  const float* const bias = rounded_bias(t, rooms.bias);
  for (int64_t start = 0; start < count; start += t.rows) {
    see_rows(t, rooms, bias, start, count - start < t.rows ? count - start : t.rows, squares);
  }
}

inline void row_gradient(const RowTraining& t, int64_t count, float* of_weights, float* of_bias) {
  Rooms rooms(t);
  rooms.of_weights = of_weights;
  rooms.of_bias = of_bias;
  const float* const bias = rounded_bias(t, rooms.bias);
  for (int64_t start = 0; start < count; start += t.rows) {
    see_rows(t, rooms, bias, start, count - start < t.rows ? count - start : t.rows, nullptr);
  }
}

inline void gram_matrix(const RowTraining& t, int64_t count, float* gram) {
  const Rooms rooms(t);
  const int64_t line = t.length + 1;
  for (int64_t group = 0; group < t.groups; ++group, gram += line * line) {
    float* const sums = gram + t.length * line;
    for (int64_t start = 0; start < count; start += t.rows) {
      const float* const inputs = t.inputs + group * t.input_group + start * t.input_row;
      const int64_t rows = count - start < t.rows ? count - start : t.rows;
      add_product({inputs, 1, t.input_row, inputs, t.input_row, gram, line, t.length, t.length, rows}, rooms.rest);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t k = 0; k < t.length; ++k) sums[k] += inputs[row * t.input_row + k];
      }
    }
    for (int64_t k = 0; k < t.length; ++k) gram[k * line + t.length] = sums[k];
    sums[t.length] += static_cast<float>(count);
  }
}

RowTrainingKernels row_training_kernels() { return {train_rows, row_errors, row_gradient, gram_matrix}; }

}  // namespace QUARK_ISA
}  // namespace quark
