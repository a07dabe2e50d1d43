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
  const Vector factor = splat<kWidth>(s.factor);
  for (int64_t i = 0; i + kWidth <= s.count; i += kWidth) {
    const Vector parameter = load<kWidth>(s.parameter + i);
    Vector mean = load<kWidth>(s.mean + i), square = load<kWidth>(s.square + i);
    const Vector gradient = load<kWidth>(s.gradient + i) * factor;
    const Vector moved = adam(parameter, kind.gradient(s, i, gradient, parameter), mean, square);
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

RunWeightStep weight_step_kernel() { return weight_step; }

}  // namespace QUARK_ISA
}  // namespace quark
