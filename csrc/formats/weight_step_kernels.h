// One iteration of finetuning, in vectors of kWidth floats. Included after lanes.h, exponential_lanes.h and
// rounding_lanes.h by the per-ISA files only.
//
// Adam adds up in the order of torch's vectors, so that with AVX-512 Adam and AdaQuant give the same bits. AdaRound's
// sigmoid and power are computed here, with an error of a few units in the last place, as torch's are.
#include "weight_step.h"

namespace quark {
namespace QUARK_ISA {

typedef FloatsOf<kWidth> Vector;
typedef IntsOf<kWidth> Mask;

constexpr float kStretch = 1.2f, kShift = -0.1f;  // of AdaRound's sigmoid

// The moments and the parameter after a step with this gradient.
struct AdamLanes {
  Vector step_size, root;

  explicit QUARK_INLINE AdamLanes(const WeightStep& s)
      : step_size(splat<kWidth>(s.step_size)), root(splat<kWidth>(s.root)) {}

  QUARK_INLINE Vector operator()(Vector parameter, Vector gradient, Vector& mean, Vector& square) const {
    constexpr float kMeanShare = static_cast<float>(1 - 0.9), kDecay = static_cast<float>(0.999);
    constexpr float kSquareShare = static_cast<float>(1 - 0.999), kLeast = static_cast<float>(1e-8);
    mean = fused(splat<kWidth>(kMeanShare), gradient - mean, mean);
    square = fused(splat<kWidth>(kSquareShare) * gradient, gradient, square * splat<kWidth>(kDecay));
    return parameter - step_size * mean / (square_root(square) / root + splat<kWidth>(kLeast));
  }
};

struct PlainLanes {
  explicit QUARK_INLINE PlainLanes(const WeightStep&) {}
  QUARK_INLINE Vector gradient(const WeightStep&, int64_t, Vector gradient, Vector) const { return gradient; }
  static constexpr bool kHasWeights = false;
};

struct AffineLanes {
  explicit QUARK_INLINE AffineLanes(const WeightStep&) {}

  QUARK_INLINE Vector gradient(const WeightStep& s, int64_t i, Vector gradient, Vector parameter) const {
    const Vector level = round_half_even(parameter / load<kWidth>(s.first + i));
    const Mask inside = (level >= load<kWidth>(s.second + i)) & (level <= load<kWidth>(s.third + i));
    return inside ? gradient : Vector{};
  }

  QUARK_INLINE Vector weight(const WeightStep& s, int64_t i, Vector parameter) const {
    const Vector scale = load<kWidth>(s.first + i);
    const Vector level = round_half_even(parameter / scale);
    const Vector above = maximum<kWidth>(load<kWidth>(s.second + i), level);
    return minimum<kWidth>(load<kWidth>(s.third + i), above) * scale;
  }
  static constexpr bool kHasWeights = true;
};

struct AdaRoundLanes {
  bool is_regularized;
  Vector exponent, regularization, one;

  explicit QUARK_INLINE AdaRoundLanes(const WeightStep& s)
      : is_regularized(s.exponent >= 0),
        exponent(splat<kWidth>(s.exponent)),
        regularization(splat<kWidth>(s.regularization)),
        one(splat<kWidth>(1.0f)) {}

  QUARK_INLINE Vector sigmoid(Vector parameter) const { return one / (one + exponential(-parameter)); }

  QUARK_INLINE Vector share(Vector sigmoid) const {
    const Vector stretched = sigmoid * splat<kWidth>(kStretch) + splat<kWidth>(kShift);
    return minimum<kWidth>(one, maximum<kWidth>(Vector{}, stretched));
  }

  QUARK_INLINE Vector gradient(const WeightStep& s, int64_t i, Vector gradient, Vector parameter) const {
    const Vector curve = sigmoid(parameter), between = share(curve);
    Vector total = gradient * load<kWidth>(s.third + i);
    if (is_regularized) {
      const Vector signed_distance = between + between - one;
      const Mask sign = bit_cast<Mask>(signed_distance) & static_cast<int32_t>(0x80000000);
      const Vector distance = bit_cast<Vector>(bit_cast<Mask>(signed_distance) ^ sign);
      const Vector slope = bit_cast<Vector>(bit_cast<Mask>(power(distance, exponent)) | sign);
      total -= (distance > Vector{} ? slope : Vector{}) * regularization;
    }
    const Mask is_free = (between > Vector{}) & (between < one);
    return is_free ? total * (curve * (one - curve) * splat<kWidth>(kStretch)) : Vector{};
  }

  QUARK_INLINE Vector weight(const WeightStep& s, int64_t i, Vector parameter) const {
    return load<kWidth>(s.first + i) + share(sigmoid(parameter)) * load<kWidth>(s.second + i);
  }
  static constexpr bool kHasWeights = true;
};

template <class Kind>
void step_of_kind(const WeightStep& s) {
  const AdamLanes adam(s);
  const Kind kind(s);
  for (int64_t i = 0; i + kWidth <= s.count; i += kWidth) {
    const Vector parameter = load<kWidth>(s.parameter + i);
    Vector mean = load<kWidth>(s.mean + i), square = load<kWidth>(s.square + i);
    const Vector moved =
        adam(parameter, kind.gradient(s, i, load<kWidth>(s.gradient + i), parameter), mean, square);
    store<kWidth>(s.mean + i, mean);
    store<kWidth>(s.square + i, square);
    store<kWidth>(s.parameter + i, moved);
    if constexpr (Kind::kHasWeights) store<kWidth>(s.weights + i, kind.weight(s, i, moved));
  }
}

// What is left at the end, in buffers of one vector.
inline void step_of_rest(const WeightStep& s, int64_t done, void (*run)(const WeightStep&)) {
  const int64_t rest = s.count - done;
  float buffers[8][kWidth];
  float* const arrays[8] = {const_cast<float*>(s.gradient), s.parameter, s.mean, s.square, s.weights,
                            const_cast<float*>(s.first), const_cast<float*>(s.second), const_cast<float*>(s.third)};
  for (int array = 0; array < 8; ++array) {
    for (int64_t k = 0; k < kWidth; ++k) {
      buffers[array][k] = arrays[array] != nullptr && k < rest ? arrays[array][done + k] : 1.0f;
    }
  }
  WeightStep part = s;
  part.count = kWidth;
  part.gradient = buffers[0];
  part.parameter = buffers[1];
  part.mean = buffers[2];
  part.square = buffers[3];
  part.weights = buffers[4];
  part.first = buffers[5];
  part.second = buffers[6];
  part.third = buffers[7];
  run(part);
  for (int array = 1; array <= 4; ++array) {
    for (int64_t k = 0; arrays[array] != nullptr && k < rest; ++k) arrays[array][done + k] = buffers[array][k];
  }
}

inline void weight_step(const WeightStep& s) {
  const auto run = s.kind == StepKind::kPlain    ? step_of_kind<PlainLanes>
                   : s.kind == StepKind::kAffine ? step_of_kind<AffineLanes>
                                                 : step_of_kind<AdaRoundLanes>;
  run(s);
  const int64_t done = s.count / kWidth * kWidth;
  if (done < s.count) step_of_rest(s, done, run);
}

// ---- the error of outputs ----

// W outputs of one row: the gradient of the squared error, but for a factor.
template <int W>
QUARK_INLINE FloatsOf<W> error_of(FloatsOf<W> value, FloatsOf<W> target, FloatsOf<W> lowest, FloatsOf<W> highest) {
  const FloatsOf<W> behind = minimum<W>(highest, maximum<W>(lowest, value));
  return behind == value ? behind - target : FloatsOf<W>{};
}

constexpr float kUnbounded = __builtin_inff();

// W neighbouring outputs in all rows. Sums are those of 16 rows each, added up in their order.
template <int W>
void column_errors(const RowErrors& b, float* values, const float* targets, const float* lowest, const float* highest,
                   float* sums) {
  const FloatsOf<W> low = lowest == nullptr ? splat<W>(-kUnbounded) : load<W>(lowest);
  const FloatsOf<W> high = highest == nullptr ? splat<W>(kUnbounded) : load<W>(highest);
  FloatsOf<W> total{};
  for (int64_t start = 0; start < b.rows; start += 16) {
    FloatsOf<W> sum{};
    for (int64_t row = start; row < b.rows && row < start + 16; ++row) {
      const int64_t place = row * b.outputs;
      const FloatsOf<W> error = error_of<W>(load<W>(values + place), load<W>(targets + place), low, high);
      store<W>(values + place, error);
      sum += error;
    }
    total += sum;
  }
  store<W>(sums, total);
}

// The one output of a group, in all rows.
inline void single_errors(const RowErrors& b, float* values, const float* targets, const float* lowest,
                          const float* highest, float* sums) {
  const float low = lowest == nullptr ? -kUnbounded : *lowest, high = highest == nullptr ? kUnbounded : *highest;
  const Vector lows = splat<kWidth>(low), highs = splat<kWidth>(high);
  Vector sum{};
  int64_t row = 0;
  for (; row + kWidth <= b.rows; row += kWidth) {
    const Vector error = error_of<kWidth>(load<kWidth>(values + row), load<kWidth>(targets + row), lows, highs);
    store<kWidth>(values + row, error);
    sum += error;
  }
  float total = 0;
  for (int lane = 0; lane < kWidth; ++lane) total += sum[lane];
  for (; row < b.rows; ++row) total += values[row] = error_of<1>(values[row], targets[row], low, high);
  *sums = total;
}

inline void row_errors(const RowErrors& b) {
  for (int64_t group = 0; group < b.groups; ++group) {
    float* const values = b.values + group * b.rows * b.outputs;
    const float* const targets = b.targets + group * b.target_stride;
    const float* const low = b.lowest == nullptr ? nullptr : b.lowest + group * b.outputs;
    const float* const high = b.highest == nullptr ? nullptr : b.highest + group * b.outputs;
    float* const sums = b.sums + group * b.outputs;
    if (b.outputs == 1) {
      single_errors(b, values, targets, low, high, sums);
      continue;
    }
    int64_t o = 0;
    const auto at = [&o](const float* bounds) { return bounds == nullptr ? nullptr : bounds + o; };
    for (; o + kWidth <= b.outputs; o += kWidth) {
      column_errors<kWidth>(b, values + o, targets + o, at(low), at(high), sums + o);
    }
    for (; o < b.outputs; ++o) column_errors<1>(b, values + o, targets + o, at(low), at(high), sums + o);
  }
}

WeightStepKernels weight_step_kernels() { return {weight_step, row_errors}; }

}  // namespace QUARK_ISA
}  // namespace quark
