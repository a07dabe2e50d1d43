// Blocks in memory: along it (`RunKernel`), across it (`ColumnKernel`), and one at a time for whatever is left.
//
// Included by the per-ISA kernel files only.

#include "block_job.h"
#include "lane_math.h"
#include "usual_math.h"

namespace quark {
namespace QUARK_ISA {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t at_least(int64_t a, int64_t least) { return a < least ? least : a; }

// A buffer on the stack up to the usual size, on the heap beyond.
template <class T, int64_t kUsual>
class Scratch {
 public:
  explicit Scratch(int64_t count) : data_(count <= kUsual ? usual_ : new T[count]) {}
  ~Scratch() {
    if (data_ != usual_) delete[] data_;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* data() { return data_; }

 private:
  alignas(4 * kWidth) T usual_[kUsual];  // vectors that cross lines take twice as long
  T* data_;
};

// ---- one block, any length and stride, one lane: tails, odd block sizes, the search of rule `mse` along lanes ----
constexpr int64_t kStageElements = 1 << 12;
constexpr int64_t kStreamElements = 1 << 10;
constexpr int kLineElements = 16;      // of a cache line
constexpr int kAheadElements = 1 << 11;  // two pages: the processor's own prefetching stops at the end of one
constexpr int64_t kTurnElements = 64;  // a multiple of the columns of a turn
constexpr int64_t kSearchWidth = 1 << 10;

template <class P>
struct SingleBlock {
  LaneMath<1, P> math;
  int64_t sub_block_size;
  bool searches;

  explicit SingleBlock(const BlockParameters& p)
      : math(p), sub_block_size(p.sub_block_size), searches(p.scale_rule == ScaleRule::kMse) {}

  // The bits of the largest magnitude of elements begin..end, and of the largest positive one.
  int32_t amax(const float* in, int64_t begin, int64_t end, int64_t stride, int32_t* largest) const {
    int32_t most = 0;
    int32_t top = 0;
    for (int64_t i = begin; i < end; ++i) {
      const float x = in[i * stride];
      const int32_t magnitude = math.magnitude(x);
      most = magnitude > most ? magnitude : most;
      top = maximum_int<1>(top, math.positive_bits(x, magnitude));
    }
    *largest = top;
    return most;
  }

  void run(const float* in, float* out, int64_t count, int64_t stride, int64_t out_stride) const {
    int32_t largest;
    const int32_t most = amax(in, 0, count, stride, &largest);
    auto scale = math.scale_of(most, largest);
    if (searches && most < kInfinity) {
      if constexpr (P::kFloatScale) {
        scale = math.float_scale(most, least_error_factor(in, count, stride, most));
      } else {
        scale = math.at_exponent(least_error(in, count, stride, scale.exponent), most);
      }
    }
    const int64_t step = P::kSpacing == Spacing::kSubBlocks ? sub_block_size : count;
    for (int64_t begin = 0; begin < count; begin += step) {
      const int64_t end = smaller(count, begin + step);
      float unit = 1.0f;
      if constexpr (P::kSpacing == Spacing::kSubBlocks) {
        unit = math.sub_block_unit(amax(in, begin, end, stride, &largest), scale.exponent);
      }
      for (int64_t i = begin; i < end; ++i) {
        out[i * out_stride] = math.quantize(in[i * stride], scale, unit);
      }
    }
  }

  // Of floor-1, floor and floor+1 the exponent with the least sum of squared errors, the first of equals.
  int32_t least_error(const float* in, int64_t count, int64_t stride, int32_t floor) const {
    int64_t width = 1;
    while (width < count) width *= 2;
    Scratch<double, kSearchWidth> errors(width);
    int32_t best = floor;
    double least = 0;
    for (int32_t step = -1; step <= 1; ++step) {
      const int32_t exponent = LaneMath<1, P>::confine(floor + step);
      const double scale = bit_cast<double>((static_cast<int64_t>(exponent) + 1023) << 52);
      const float inverse = LaneMath<1, P>::exp2(-exponent);
      const double total = squared_error(in, count, stride, {scale, inverse, exponent}, errors.data(), width);
      if (step == -1 || total < least) {
        best = exponent;
        least = total;
      }
    }
    return best;
  }

  // Of kScaleFactors the one with the least sum of squared errors, the first of equals.
  float least_error_factor(const float* in, int64_t count, int64_t stride, int32_t most) const {
    int64_t width = 1;
    while (width < count) width *= 2;
    Scratch<double, kSearchWidth> errors(width);
    float best = 0.0f;
    double least = 0;
    for (const float factor : kScaleFactors) {
      const float scale = math.float_scale(most, factor).inverse;
      const double total = squared_error(in, count, stride, {scale, scale, 0}, errors.data(), width);
      if (best == 0.0f || total < least) {
        best = factor;
        least = total;
      }
    }
    return best;
  }

  struct TriedScale {
    double scale;
    float inverse;  // as LaneMath::element takes it
    int32_t exponent;
  };

  double squared_error(const float* in, int64_t count, int64_t stride, TriedScale tried, double* errors,
                       int64_t width) const {
    float unit = 1.0f;
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (P::kSpacing == Spacing::kSubBlocks) {
        int32_t unused;
        const int64_t end = smaller(count, i + sub_block_size);
        if (i % sub_block_size == 0) unit = math.sub_block_unit(amax(in, i, end, stride, &unused), tried.exponent);
      }
      float x = in[i * stride];
      if constexpr (P::kSpacing == Spacing::kSubBlocks) {
        if (math.flush && (bit_cast<int32_t>(x) & kMagnitude) < kSmallestNormal) x = 0.0f;
      }
      const double element = static_cast<double>(math.element(x, tried.inverse, unit));
      const double error = element * tried.scale - static_cast<double>(x);
      errors[i] = (bit_cast<int32_t>(x) & kMagnitude) < kInfinity ? error * error : 0.0;
    }
    for (int64_t i = count; i < width; ++i) errors[i] = 0.0;
    for (int64_t half = width / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) errors[i] += errors[i + half];
    }
    return errors[0];
  }
};

// ---- blocks one after the other in memory, kBlock a power of two that divides or is divided by the vector ----
template <class P, int kBlock, int kSub>
struct RunKernel {
  static constexpr int W = kWidth;
  static constexpr int kVectors = kBlock > W ? kBlock / W : 1;
  static constexpr int kGroup = kBlock < W ? kBlock : W;
  static constexpr int kStep = kVectors * W;
  static constexpr int kTurn = kGroup * kStep;  // elements whose scales fill one vector
  typedef UsualMath<W, P> Math;
  typedef FloatsOf<W> F;
  typedef IntsOf<W> I;

  // Quantizes whole vectors of blocks; gives back how many elements that were. `fetches` what will be read soon.
  template <bool kStream>
  static int64_t run(const Math& math, const float* in, float* out, int64_t count, bool fetches) {
    Scales next{};
    if (count >= kTurn) next = scales_of(math, in);
    int64_t i = 0;
    for (; i + kTurn <= count; i += kTurn) {
      if (fetches) {
        for (int line = 0; line < kTurn; line += kLineElements) prefetch(in + i, kAheadElements + line);
      }
      const Scales scales = next;
      // one turn early: scales take long to arrive, and this turn's elements are work to do meanwhile
      if (i + 2 * kTurn <= count) next = scales_of(math, in + i + kTurn);
      if (scales.are_usual) {
        usual_steps<kStream>(math, scales, in + i, out + i);
      } else {
        general_steps(math, in + i, out + i, kTurn);
      }
    }
    const int64_t rest = (count - i) / kStep * kStep;
    general_steps(math, in + i, out + i, rest);
    return i + rest;
  }

  // The scales of a turn: lane i of each group is for step i.
  struct Scales {
    alignas(4 * W) float lanes[W];
    bool are_usual;
  };

  static QUARK_INLINE Scales scales_of(const Math& math, const float* in) {
    I most[kGroup];
    I largest[kGroup];
    for (int step = 0; step < kGroup; ++step) {
      const F first = load<W>(in + step * kStep);
      most[step] = Math::magnitude(first);
      largest[step] = bit_cast<I>(first);
      for (int v = 1; v < kVectors; ++v) {
        const F x = load<W>(in + step * kStep + v * W);
        most[step] = maximum_int<W>(most[step], Math::magnitude(x));
        largest[step] = maximum_int<W>(largest[step], bit_cast<I>(x));
      }
    }
    const I block_most = group_maxima<W, kGroup>(most);
    const I block_largest = P::kCarry ? group_maxima<W, kGroup>(largest) : block_most;
    Scales scales;
    store<W>(scales.lanes, math.usual_scale(block_most, block_largest));
    scales.are_usual = !any<W>(math.is_unusual(block_most));
    return scales;
  }

  template <bool kStream>
  static QUARK_INLINE void usual_steps(const Math& math, const Scales& scales, const float* in, float* out) {
    for (int step = 0; step < kGroup; ++step) {
      const F block_scale = spread_lane<W, kGroup>(scales.lanes, step);
      for (int v = 0; v < kVectors; ++v) {
        const F x = load<W>(in + step * kStep + v * W);
        F scale = block_scale;
        if constexpr (P::kSpacing == Spacing::kSubBlocks) {
          scale = math.usual_sub_scale(group_maximum<W, kSub>(Math::magnitude(x)), block_scale);
        }
        put<W, kStream>(out + step * kStep + v * W, math.usual_quantize(x, scale));
      }
    }
  }

  // Blocks of any kind.
  static QUARK_NOINLINE void general_steps(const LaneMath<W, P>& math, const float* in, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i += kStep) {
      F x[kVectors];
      I most = splat_int<W>(0);
      I largest = splat_int<W>(0);
      for (int v = 0; v < kVectors; ++v) {
        x[v] = load<W>(in + i + v * W);
        const I magnitude = math.magnitude(x[v]);
        most = maximum_int<W>(most, magnitude);
        if constexpr (P::kCarry) largest = maximum_int<W>(largest, math.positive_bits(x[v], magnitude));
      }
      most = group_maximum<W, kGroup>(most);
      if constexpr (P::kCarry) largest = group_maximum<W, kGroup>(largest);
      const auto scale = math.scale_of(most, largest);
      for (int v = 0; v < kVectors; ++v) {
        F unit = F{};
        if constexpr (P::kSpacing == Spacing::kSubBlocks) {
          unit = math.sub_block_unit(group_maximum<W, kSub>(math.magnitude(x[v])), scale.exponent);
        }
        store<W>(out + i + v * W, math.quantize(x[v], scale, unit));
      }
    }
  }
};

// A block of rows: how many, how many columns, and from one row to the next in what is read and what is written.
struct Tile {
  int64_t rows;
  int64_t columns;
  int64_t stride;
  int64_t out_stride;
};

// ---- a block of rows, W columns at a time ----
template <class P, int W>
struct ColumnKernel {
  typedef UsualMath<W, P> Math;
  typedef FloatsOf<W> F;
  typedef IntsOf<W> I;

  static constexpr int kTogether = 4;    // vectors of a turn: their scales stay in registers
  static constexpr int kTurnsAhead = 2;  // fetched while this turn is written, so that memory does both at once

  Math math;
  int64_t rows;
  int64_t stride;
  int64_t out_stride;
  int64_t sub_block_size;
  bool searches;
  bool streams;  // the stride keeps the alignment of the first row

  ColumnKernel(const BlockParameters& p, Tile tile, bool streams)
      : math(p),
        rows(tile.rows),
        stride(tile.stride),
        out_stride(tile.out_stride),
        sub_block_size(p.sub_block_size),
        searches(p.scale_rule == ScaleRule::kMse),
        streams(streams) {}

  // Columns 0..count. A vector that does not fit at an end overlaps its neighbour and writes the same values again, for
  // which `in` must not be `out`.
  void run(const float* in, float* out, int64_t count) const {
    const int64_t misaligned = reinterpret_cast<uintptr_t>(out) / sizeof(float) % W;
    int64_t column = streams && misaligned ? W - misaligned : 0;
    if (column) run_vectors<1, false>(in, out);
    for (; column + kTogether * W <= count; column += kTogether * W) {
      if (W == kWidth && streams) {
        run_vectors<kTogether, true>(in + column, out + column);
      } else {
        run_vectors<kTogether, false>(in + column, out + column);
      }
    }
    for (; column + W <= count; column += W) run_vectors<1, false>(in + column, out + column);
    if (column < count) run_vectors<1, false>(in + count - W, out + count - W);
  }

  template <int kVectors, bool kStream>
  void run_vectors(const float* in, float* out) const {
    if (searches) {
      for (int v = 0; v < kVectors; ++v) run_general(in + v * W, out + v * W);
      return;
    }
    I most[kVectors] = {};
    I largest[kVectors] = {};
    for (int64_t row = 0; row < rows; ++row) {
      for (int v = 0; v < kVectors; ++v) {
        const F x = load<W>(in + row * stride + v * W);
        most[v] = maximum_int<W>(most[v], Math::magnitude(x));
        if constexpr (P::kCarry) largest[v] = maximum_int<W>(largest[v], bit_cast<I>(x));
      }
    }
    I is_unusual = splat_int<W>(0);
    F scales[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      is_unusual |= math.is_unusual(most[v]);
      scales[v] = math.usual_scale(most[v], largest[v]);
    }
    if (any<W>(is_unusual)) {
      for (int v = 0; v < kVectors; ++v) run_general(in + v * W, out + v * W);
      return;
    }
    const int64_t row_step = P::kSpacing == Spacing::kSubBlocks ? sub_block_size : 1;
    for (int64_t row = 0; row < rows; row += row_step) {
      const int64_t count = smaller(rows - row, row_step);
      write_rows<kVectors, kStream>(in + row * stride, out + row * out_stride, count, scales);
    }
  }

  // A row, or the rows of a sub-block.
  template <int kVectors, bool kStream>
  QUARK_INLINE void write_rows(const float* in, float* out, int64_t count, const F* block_scales) const {
    F scales[kVectors];
    for (int v = 0; v < kVectors; ++v) scales[v] = block_scales[v];
    if constexpr (P::kSpacing == Spacing::kSubBlocks) {
      I most[kVectors] = {};
      for (int64_t row = 0; row < count; ++row) {
        for (int v = 0; v < kVectors; ++v) {
          most[v] = maximum_int<W>(most[v], Math::magnitude(load<W>(in + row * stride + v * W)));
        }
      }
      for (int v = 0; v < kVectors; ++v) scales[v] = math.usual_sub_scale(most[v], scales[v]);
    }
    for (int64_t row = 0; row < count; ++row) {
      for (int v = 0; v < kVectors; ++v) {
        if (v * W % kLineElements == 0) prefetch(in + row * stride + v * W, kTurnsAhead * kVectors * W);
        const F x = load<W>(in + row * stride + v * W);
        put<W, kStream>(out + row * out_stride + v * W, math.usual_quantize(x, scales[v]));
      }
    }
  }

  // Blocks of any kind.
  QUARK_NOINLINE void run_general(const float* in, float* out) const {
    const LaneMath<W, P>& general = math;
    I most = splat_int<W>(0);
    I largest = splat_int<W>(0);
    for (int64_t row = 0; row < rows; ++row) accumulate(general, in + row * stride, most, largest);
    auto scale = general.scale_of(most, largest);
    if (searches) scale = least_error(in, most, scale);
    const int64_t row_step = P::kSpacing == Spacing::kSubBlocks ? sub_block_size : rows;
    for (int64_t begin = 0; begin < rows; begin += row_step) {
      const int64_t end = smaller(rows, begin + row_step);
      F unit = F{};
      if constexpr (P::kSpacing == Spacing::kSubBlocks) {
        I own = splat_int<W>(0);
        for (int64_t row = begin; row < end; ++row) accumulate(general, in + row * stride, own, largest);
        unit = general.sub_block_unit(own, scale.exponent);
      }
      for (int64_t row = begin; row < end; ++row) {
        store<W>(out + row * out_stride, general.quantize(load<W>(in + row * stride), scale, unit));
      }
    }
  }

  typedef typename LaneMath<W, P>::Scale Scale;

  // The scales that SingleBlock finds for each column, found side by side: the same sums in the same order.
  Scale least_error(const float* in, I most, const Scale& usual) const {
    const LaneMath<W, P>& general = math;
    int64_t width = 1;
    while (width < rows) width *= 2;
    Scratch<double, kSearchWidth> errors(width * W);
    double least[W] = {};
    bool is_first = true;
    if constexpr (P::kFloatScale) {
      F best = usual.inverse;
      for (const float factor : kScaleFactors) {
        const F scale = general.rounded_scale(most, factor);
        double multiplier[W];
        for (int i = 0; i < W; ++i) multiplier[i] = static_cast<double>(scale[i]);
        add_errors(in, scale, splat_int<W>(0), multiplier, errors.data(), width);
        for (int i = 0; i < W; ++i) {
          if (most[i] < kInfinity && (is_first || errors.data()[i] < least[i])) {
            best[i] = scale[i];
            least[i] = errors.data()[i];
          }
        }
        is_first = false;
      }
      return general.at_scale(best, most);
    } else {
      I best = usual.exponent;
      for (int32_t step = -1; step <= 1; ++step) {
        const I exponent = LaneMath<W, P>::confine(usual.exponent + step);
        double multiplier[W];
        for (int i = 0; i < W; ++i) multiplier[i] = bit_cast<double>((static_cast<int64_t>(exponent[i]) + 1023) << 52);
        add_errors(in, LaneMath<W, P>::exp2(-exponent), exponent, multiplier, errors.data(), width);
        for (int i = 0; i < W; ++i) {
          if (most[i] < kInfinity && (is_first || errors.data()[i] < least[i])) {
            best[i] = exponent[i];
            least[i] = errors.data()[i];
          }
        }
        is_first = false;
      }
      return general.at_exponent(best, most);
    }
  }

  // The sums of squared errors at these scales, in the first W of `errors`, which holds `width` rows of W.
  void add_errors(const float* in, F inverse, I exponent, const double* scale, double* errors, int64_t width) const {
    const LaneMath<W, P>& general = math;
    F unit = splat<W>(1.0f);
    for (int64_t row = 0; row < rows; ++row) {
      F x = load<W>(in + row * stride);
      if constexpr (P::kSpacing == Spacing::kSubBlocks) {
        if (row % sub_block_size == 0) {
          I own = splat_int<W>(0);
          I unused = splat_int<W>(0);
          const int64_t end = smaller(rows, row + sub_block_size);
          for (int64_t other = row; other < end; ++other) accumulate(general, in + other * stride, own, unused);
          unit = general.sub_block_unit(own, exponent);
        }
        if (general.flush) x = (bit_cast<I>(x) & kMagnitude) < kSmallestNormal ? F{} : x;
      }
      float values[W];
      float elements[W];
      store<W>(values, x);
      store<W>(elements, general.element(x, inverse, unit));
      double* const squares = errors + row * W;
      for (int i = 0; i < W; ++i) {
        const double error = static_cast<double>(elements[i]) * scale[i] - static_cast<double>(values[i]);
        squares[i] = (bit_cast<int32_t>(values[i]) & kMagnitude) < kInfinity ? error * error : 0.0;
      }
    }
    for (int64_t i = rows * W; i < width * W; ++i) errors[i] = 0.0;
    for (int64_t half = width / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half * W; ++i) errors[i] += errors[i + half * W];
    }
  }

  static QUARK_INLINE void accumulate(const LaneMath<W, P>& general, const float* in, I& most, I& largest) {
    const F x = load<W>(in);
    const I magnitude = general.magnitude(x);
    most = maximum_int<W>(most, magnitude);
    if constexpr (P::kCarry) largest = maximum_int<W>(largest, general.positive_bits(x, magnitude));
  }
};

// ---- what is done to a tensor on the way ----
constexpr int64_t kOverrun = kWidth;  // elements that a buffer of prepared values has at its end

// Like ONNX's operators Min and Sub: a NaN stays one.
struct Prepare {
  FloatsOf<kWidth> bound;
  FloatsOf<kWidth> center;
  const float* end;  // of the tensor
  int64_t ahead;     // where what is read next begins

  // `count` neighbours, in whole vectors: up to kOverrun - 1 elements behind them are overwritten.
  QUARK_INLINE void run(const float* in, float* out, int64_t count) const {
    int64_t i = 0;
    for (; i < count && in + i + kWidth <= end; i += kWidth) {
      if (i % kLineElements == 0) prefetch(in + i, ahead);
      store<kWidth>(out + i, of(load<kWidth>(in + i)));
    }
    if (i < count) {
      alignas(4 * kWidth) float last[kWidth] = {};
      for (int64_t k = i; k < count; ++k) last[k - i] = in[k];
      store<kWidth>(out + i, of(load<kWidth>(last)));
    }
  }

  // What zeros become.
  QUARK_INLINE void fill(float* out, int64_t count) const {
    const FloatsOf<kWidth> value = of(FloatsOf<kWidth>{});
    for (int64_t i = 0; i < count; i += kWidth) store<kWidth>(out + i, value);
  }

 private:
  QUARK_INLINE FloatsOf<kWidth> of(FloatsOf<kWidth> x) const { return minimum<kWidth>(bound, x) - center; }
};

// `count` neighbours of a padded plane, from row y and column x of the plane on, both of which are negative before it.
inline void prepare_padded(const Prepare& prepare, const Preparation& q, const float* plane, int64_t y, int64_t x,
                           float* out, int64_t count) {
  const float* const end = out + count;
  const int64_t right = q.padded_width - q.left;  // where a row ends
  for (; out < end; ++y, x = -q.left) {
    const int64_t row = smaller(right - x, end - out);
    if (y < 0 || y >= q.height) {
      prepare.fill(out, row);
    } else {
      const int64_t before = smaller(row, at_least(-x, 0));
      const int64_t inside = smaller(row, q.width - x);  // up to there
      prepare.fill(out, before);
      prepare.run(plane + y * q.width + x + before, out + before, inside - before);
      const int64_t after = at_least(inside, before);
      prepare.fill(out + after, row - after);
    }
    out += row;
  }
}

// The rows of a tile that begins at element `at` of the prepared tensor, one after the other. `wide` has kOverrun more.
inline void prepare_tile(const BlockJob& job, int64_t at, int64_t rows, int64_t columns, float* wide) {
  const Preparation& q = *job.preparation;
  const Geometry& g = job.geometry;
  const int64_t size = q.height * q.width;
  const int64_t plane = at / g.inner;
  const int64_t column = at % g.inner;
  const int64_t channel = plane % g.n;
  const bool is_padded = g.inner != size;
  const int64_t y = column / q.padded_width - q.top;
  const int64_t x = column % q.padded_width - q.left;
  const float* in = job.in32() + plane * size;
  const float* const end = job.in32() + g.outer * g.n * size;
  for (int64_t row = 0; row < rows; ++row, in += size, wide += columns) {
    const Prepare prepare{splat<kWidth>(q.bounds[(channel + row) * q.bounds_step]),
                          splat<kWidth>(q.centers[(channel + row) * q.centers_step]), end, columns};
    if (is_padded) {
      prepare_padded(prepare, q, in, y, x, wide, columns);
    } else {
      prepare.run(in + column, wide, columns);
    }
  }
}

// The tile that is a chunk, in elements of the output.
inline Tile tile_of(const BlockJob& job, int64_t chunk, int64_t* at) {
  const Geometry& g = job.geometry;
  const int64_t block_size = job.parameters.block_size;
  const int64_t tile = chunk % job.tiles;
  const int64_t block = chunk / job.tiles % job.blocks_in_row;
  const int64_t outer = chunk / job.tiles / job.blocks_in_row;
  const int64_t column = tile * job.tile;
  *at = (outer * g.n + block * block_size) * g.inner + column;
  const int64_t columns = tile + 1 == job.tiles ? g.inner - column : job.tile;
  return {smaller(block_size, g.n - block * block_size), columns, g.inner, g.inner};
}

// As many of its columns at a time as stay in the first-level cache.
inline int64_t columns_of_piece(int64_t rows) {
  return at_least(kStageElements / rows / kTurnElements * kTurnElements, kTurnElements);
}

// ---- a job's chunks ----
template <class P>
struct Chunks {
  const BlockJob& job;
  const BlockParameters& p;
  SingleBlock<P> single;

  explicit Chunks(const BlockJob& job) : job(job), p(job.parameters), single(job.parameters) {}

  void run(int64_t begin, int64_t end) const {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      if (job.layout == Layout::kRuns) {
        run_blocks(chunk * job.blocks_in_chunk,
                   smaller((chunk + 1) * job.blocks_in_chunk, job.geometry.outer * job.blocks_in_row));
      } else {
        run_tile(chunk);
      }
    }
    if (job.streams) finish_streams();
  }

  // Blocks begin..end, counted through all rows.
  void run_blocks(int64_t begin, int64_t end) const {
    while (begin < end) {
      const int64_t row = begin / job.blocks_in_row;
      const int64_t first = begin % job.blocks_in_row;
      const int64_t last = smaller(job.blocks_in_row, first + end - begin);
      const int64_t start = row * job.geometry.n + first * p.block_size;
      const int64_t stop = row * job.geometry.n + smaller(last * p.block_size, job.geometry.n);
      begin += last - first;
      if (job.is_staged()) {
        run_staged(start, stop);
      } else {
        run_elements(job.in32() + start, job.out32() + start, stop - start);
      }
    }
  }

  // A piece at a time through a buffer of float32; the pieces are whole blocks, or one that is longer than usual.
  void run_staged(int64_t start, int64_t stop) const {
    const int64_t piece = p.block_size > kStageElements ? p.block_size : kStageElements / p.block_size * p.block_size;
    Scratch<float, kStageElements> buffer(piece);
    float* wide = buffer.data();
    for (; start < stop; start += piece) {
      const int64_t count = smaller(piece, stop - start);
      stage(start, wide, count);
      run_elements(wide, wide, count);
      unstage(wide, start, count);
    }
  }

  // count neighbours of the input as float32, rounded to bfloat16 if the job says so.
  void stage(int64_t at, float* wide, int64_t count) const {
    if (job.storage == Storage::kFloat16) {
      widen(job.in16() + at, wide, count);
    } else {
      for (int64_t i = 0; i < count; ++i) wide[i] = job.in32()[at + i];
    }
    if (p.round_to_bfloat16) {
      for (int64_t i = 0; i < count; ++i) wide[i] = round_to_bfloat16(wide[i]);
    }
  }

  void unstage(const float* wide, int64_t at, int64_t count) const {
    if (job.storage == Storage::kFloat16) return narrow(wide, job.out16() + at, count);
    for (int64_t i = 0; i < count; ++i) job.out32()[at + i] = wide[i];
  }

  void run_elements(const float* in, float* out, int64_t count) const {
    for (int64_t i = run_fast(in, out, count); i < count; i += p.block_size) {
      single.run(in + i, out + i, smaller(p.block_size, count - i), 1, 1);
    }
  }

  // As many whole blocks as the kernels for usual block sizes take.
  int64_t run_fast(const float* in, float* out, int64_t count) const {
    if (p.scale_rule == ScaleRule::kMse) return run_searched(in, out, count);
    if constexpr (P::kSpacing == Spacing::kSubBlocks) {
      if (p.sub_block_size != 2) return 0;
    }
    switch (p.block_size) {
      case 8: return run_sized<8>(in, out, count);
      case 16: return run_sized<16>(in, out, count);
      case 32: return run_sized<32>(in, out, count);
      case 64: return run_sized<64>(in, out, count);
      default: return 0;
    }
  }

  // Rule `mse` searches the scales of kWidth whole blocks together, in a buffer where they stand side by side.
  int64_t run_searched(const float* in, float* out, int64_t count) const {
    const int64_t block = p.block_size;
    const int64_t together = kWidth * block;
    if (together > kStreamElements) return 0;
    const ColumnKernel<P, kWidth> kernel(p, {block, kWidth, kWidth, kWidth}, false);
    float columns[kStreamElements] = {};  // GCC does not see that what is read was written
    float result[kStreamElements];
    int64_t done = 0;
    for (; done + together <= count; done += together) {
      for (int64_t lane = 0; lane < kWidth; ++lane) {
        for (int64_t row = 0; row < block; ++row) columns[row * kWidth + lane] = in[done + lane * block + row];
      }
      kernel.run(columns, result, kWidth);
      for (int64_t lane = 0; lane < kWidth; ++lane) {
        for (int64_t row = 0; row < block; ++row) out[done + lane * block + row] = result[row * kWidth + lane];
      }
    }
    return done;
  }

  template <int kBlock>
  int64_t run_sized(const float* in, float* out, int64_t count) const {
    typedef RunKernel<P, kBlock, 2> Kernel;
    const typename Kernel::Math math(p);
    const int64_t whole = count / kBlock * kBlock;  // a shorter last block must not be taken for a whole one
    if (!job.streams) return Kernel::template run<false>(math, in, out, whole, false);
    if (is_aligned(out)) return Kernel::template run<true>(math, in, out, whole, true);
    // streaming wants aligned addresses: go through a buffer that stays in the first-level cache
    alignas(4 * kWidth) float buffer[kStreamElements];
    int64_t done = 0;
    while (done < whole) {
      const int64_t piece = smaller(kStreamElements, whole - done);
      const int64_t ready = Kernel::template run<false>(math, in + done, buffer, piece, true);
      if (ready == 0) break;
      stream_copy(buffer, out + done, ready);
      done += ready;
    }
    return done;
  }

  void run_tile(int64_t chunk) const {
    int64_t at;
    Tile tile = tile_of(job, chunk, &at);
    // in place, vectors that overlap at an end would read what was written before
    const int64_t rest = job.in == job.out ? tile.columns % kWidth : 0;
    if (!job.is_staged() && (rest == 0 || tile.columns > kWidth)) {
      Scratch<float, kStreamElements> last(rest ? tile.rows * kWidth : 0);
      if (rest) last_vectors(at, tile, last.data());
      tile.columns -= rest;
      // narrower vectors would leave lines half written while sub-blocks go back and forth between rows
      const bool is_whole_line = kWidth == 16 || P::kSpacing != Spacing::kSubBlocks;
      const bool streams = job.streams && is_whole_line && tile.stride % kWidth == 0;
      run_columns(job.in32() + at, job.out32() + at, tile, streams);
      if (rest) put_last(last.data(), at, tile, kWidth - rest);
      return;
    }
    const int64_t piece = columns_of_piece(tile.rows);
    const int64_t end = at + tile.columns;
    Scratch<float, 2 * kStageElements + kOverrun> buffer(2 * tile.rows * piece + kOverrun);
    for (; at < end; at += piece) {
      tile.columns = smaller(piece, end - at);
      run_staged_columns(at, tile, buffer.data());
    }
  }

  // The last vector of every row, quantized: what lies before it is overwritten when its turn comes.
  QUARK_NOINLINE void last_vectors(int64_t at, const Tile& tile, float* values) const {
    const float* last = job.in32() + at + tile.columns - kWidth;
    for (int64_t row = 0; row < tile.rows; ++row) {
      store<kWidth>(values + row * kWidth, load<kWidth>(last + row * tile.stride));
    }
    ColumnKernel<P, kWidth>(p, {tile.rows, kWidth, kWidth, kWidth}, false).run_general(values, values);
  }

  // Writes the columns from `begin` on of what `last_vectors` found.
  QUARK_NOINLINE void put_last(const float* values, int64_t at, const Tile& tile, int64_t begin) const {
    for (int64_t row = 0; row < tile.rows; ++row) {
      float* out = job.out32() + at + row * tile.stride + tile.columns;
      for (int64_t i = begin; i < kWidth; ++i) out[i - begin] = values[row * kWidth + i];
    }
  }

  // Columns through a buffer for twice as many elements.
  void run_staged_columns(int64_t at, Tile tile, float* wide) const {
    const int64_t columns = tile.columns;
    if (job.preparation != nullptr) {
      prepare_tile(job, at, tile.rows, columns, wide);
      if (p.round_to_bfloat16) {
        for (int64_t i = 0; i < tile.rows * columns; ++i) wide[i] = round_to_bfloat16(wide[i]);
      }
    } else {
      for (int64_t row = 0; row < tile.rows; ++row) stage(at + row * tile.stride, wide + row * columns, columns);
    }
    if (job.storage == Storage::kFloat32) {
      return run_columns(wide, job.out32() + at, {tile.rows, columns, columns, tile.out_stride}, false);
    }
    float* result = wide + tile.rows * columns;
    run_columns(wide, result, {tile.rows, columns, columns, columns}, false);
    for (int64_t row = 0; row < tile.rows; ++row) {
      unstage(result + row * columns, at + row * tile.out_stride, columns);
    }
  }

  void run_columns(const float* in, float* out, Tile tile, bool streams) const {
    if (tile.columns >= kWidth) {
      ColumnKernel<P, kWidth>(p, tile, streams).run(in, out, tile.columns);
    } else if (kWidth > 8 && tile.columns >= 8) {
      ColumnKernel<P, 8>(p, tile, false).run(in, out, tile.columns);
    } else if (tile.columns >= 4) {
      ColumnKernel<P, 4>(p, tile, false).run(in, out, tile.columns);
    } else {
      for (int64_t c = 0; c < tile.columns; ++c) {
        single.run(in + c, out + c, tile.rows, tile.stride, tile.out_stride);
      }
    }
  }
};

template <Spacing kSpacing, bool kCarry, bool kFloatScale>
void run_spacing(const BlockJob& job, int64_t begin, int64_t end) {
  const bool half_even = job.parameters.rounding == Rounding::kHalfEven;
  const bool passthrough = job.parameters.nonfinite == NonFinite::kPassthrough;
  if (half_even) {
    if (passthrough) return Chunks<Policy<kSpacing, true, true, kCarry, kFloatScale>>(job).run(begin, end);
    return Chunks<Policy<kSpacing, true, false, kCarry, kFloatScale>>(job).run(begin, end);
  }
  if (passthrough) return Chunks<Policy<kSpacing, false, true, kCarry, kFloatScale>>(job).run(begin, end);
  return Chunks<Policy<kSpacing, false, false, kCarry, kFloatScale>>(job).run(begin, end);
}

void run_chunks(const BlockJob& job, int64_t begin, int64_t end) {
  if (has_float_scale(job.parameters)) {
    if (is_uniform(job.parameters)) return run_spacing<Spacing::kUniform, false, true>(job, begin, end);
    return run_spacing<Spacing::kFloat, false, true>(job, begin, end);
  }
  if (job.parameters.sub_block_size > 0) return run_spacing<Spacing::kSubBlocks, false, false>(job, begin, end);
  if (job.parameters.carry) return run_spacing<Spacing::kUniform, true, false>(job, begin, end);
  if (is_uniform(job.parameters)) return run_spacing<Spacing::kUniform, false, false>(job, begin, end);
  return run_spacing<Spacing::kFloat, false, false>(job, begin, end);
}

namespace {

inline IntsOf<kWidth> finite_magnitudes(const float* in) {
  const IntsOf<kWidth> bits = bit_cast<IntsOf<kWidth>>(load<kWidth>(in)) & kMagnitude;
  return bits < kInfinity ? bits : splat_int<kWidth>(0);
}

int32_t largest_of(const float* in, int64_t count) {
  constexpr int kChains = 4;  // independent maxima, so that none waits for the last
  IntsOf<kWidth> most[kChains];
  for (int chain = 0; chain < kChains; ++chain) most[chain] = splat_int<kWidth>(0);
  int64_t i = 0;
  for (; i + kChains * kWidth <= count; i += kChains * kWidth) {
    for (int line = 0; line < kChains * kWidth; line += kLineElements) prefetch(in + i, kAheadElements + line);
    for (int chain = 0; chain < kChains; ++chain) {
      most[chain] = maximum_int<kWidth>(most[chain], finite_magnitudes(in + i + chain * kWidth));
    }
  }
  int32_t largest = 0;
  for (int chain = 0; chain < kChains; ++chain) {
    for (int lane = 0; lane < kWidth; ++lane) largest = most[chain][lane] > largest ? most[chain][lane] : largest;
  }
  for (; i < count; ++i) {
    const int32_t bits = bit_cast<int32_t>(in[i]) & kMagnitude;
    if (bits < kInfinity && bits > largest) largest = bits;
  }
  return largest;
}

}  // namespace

int32_t largest_finite(const void* in, Storage storage, int64_t begin, int64_t end) {
  if (storage == Storage::kFloat32) return largest_of(static_cast<const float*>(in) + begin, end - begin);
  float wide[kStageElements];
  int32_t largest = 0;
  for (; begin < end; begin += kStageElements) {
    const int64_t count = smaller(kStageElements, end - begin);
    widen(static_cast<const uint16_t*>(in) + begin, wide, count);
    const int32_t own = largest_of(wide, count);
    largest = own > largest ? own : largest;
  }
  return largest;
}

int32_t prepare_chunks(const BlockJob& job, int64_t begin, int64_t end) {
  int32_t largest = 0;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    int64_t at;
    const Tile tile = tile_of(job, chunk, &at);
    const int64_t piece = columns_of_piece(tile.rows);
    Scratch<float, kStageElements + kOverrun> buffer(tile.rows * piece + kOverrun);
    for (const int64_t stop = at + tile.columns; at < stop; at += piece) {
      const int64_t columns = smaller(piece, stop - at);
      prepare_tile(job, at, tile.rows, columns, buffer.data());
      const int32_t own = largest_of(buffer.data(), tile.rows * columns);
      largest = own > largest ? own : largest;
      for (int64_t row = 0; row < tile.rows; ++row) {
        const float* from = buffer.data() + row * columns;
        std::memcpy(job.out32() + at + row * tile.out_stride, from, static_cast<size_t>(columns) * sizeof(float));
      }
    }
  }
  return largest;
}

}  // namespace QUARK_ISA
}  // namespace quark
