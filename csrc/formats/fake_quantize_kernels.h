// Quantizers to train through, in vectors of kWidth floats. Included after double_lanes.h and rounding_lanes.h by the
// per-ISA files only.
//
// With u = x / s, level = clip(round(u)) and `inside` as the kind has it:
//
//     value = level * s      gradient of x = inside ? g : 0      slope = inside ? round(u) - u : clip(u), 0 for NaN
//
// NaN is level 0 for kAffine and stays NaN for the others.
#include "fake_quantize.h"

namespace quark {
namespace QUARK_ISA {

template <FakeKind kKind, bool kMultiplies>
struct FakeLanes {
  typedef FloatsOf<kWidth> F;
  typedef IntsOf<kWidth> I;
  F factor, step, lowest, highest;

  explicit QUARK_INLINE FakeLanes(const FakeStep& s)
      : factor(splat<kWidth>(kMultiplies ? s.inverse : s.step)),
        step(splat<kWidth>(s.step)),
        lowest(splat<kWidth>(s.lowest)),
        highest(splat<kWidth>(s.highest)) {}

  QUARK_INLINE F steps_of(F x) const { return kMultiplies ? x * factor : x / factor; }

  // NaN stays NaN: it is the second operand.
  QUARK_INLINE F clip(F v) const { return minimum<kWidth>(highest, maximum<kWidth>(lowest, v)); }

  QUARK_INLINE F value(F x) const {
    const F level = round_half_even(clip(steps_of(x)));
    if constexpr (kKind == FakeKind::kAffine) return (level == level ? level : F{}) * step;
    return level * step;
  }

  QUARK_INLINE I is_inside(F steps, F rounded) const {
    if constexpr (kKind == FakeKind::kStep) return (steps > lowest) & (steps < highest);
    return (rounded >= lowest) & (rounded <= highest);
  }

  // The gradient of x; adds what the step's is made of.
  QUARK_INLINE F gradient(F x, F gradient, DoublePair& sum) const {
    const F steps = steps_of(x);
    const F rounded = round_half_even(steps);
    const I inside = is_inside(steps, rounded);
    if constexpr (kKind != FakeKind::kAffine) {
      const F outside = clip(steps);
      const F slope = inside ? rounded - steps : (outside == outside ? outside : F{});
      const DoublePair slopes = widen(slope), gradients = widen(gradient);
      sum.low += slopes.low * gradients.low;
      sum.high += slopes.high * gradients.high;
    }
    return inside ? gradient : F{};
  }
};

template <class L>
void lane_values(const float* x, float* out, int64_t n, const FakeStep& step) {
  const L lanes(step);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store<kWidth>(out + i, lanes.value(load<kWidth>(x + i)));
  if (i == n) return;
  float rest[kWidth];
  store<kWidth>(rest, lanes.value(load<kWidth>(Tail<kWidth>(x + i, n - i, 0.0f).values)));
  for (int64_t k = 0; i + k < n; ++k) out[i + k] = rest[k];
}

template <class L>
double lane_gradients(const float* x, const float* gradient, float* out, int64_t n, const FakeStep& step) {
  const L lanes(step);
  DoublePair even{}, odd{};  // two, since a sum waits for the one before
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    store<kWidth>(out + i, lanes.gradient(load<kWidth>(x + i), load<kWidth>(gradient + i), even));
    const FloatsOf<kWidth> next = load<kWidth>(gradient + i + kWidth);
    store<kWidth>(out + i + kWidth, lanes.gradient(load<kWidth>(x + i + kWidth), next, odd));
  }
  for (; i + kWidth <= n; i += kWidth) {
    store<kWidth>(out + i, lanes.gradient(load<kWidth>(x + i), load<kWidth>(gradient + i), even));
  }
  if (i < n) {  // no gradient where there is no element
    const FloatsOf<kWidth> last = load<kWidth>(Tail<kWidth>(gradient + i, n - i, 0.0f).values);
    float rest[kWidth];
    store<kWidth>(rest, lanes.gradient(load<kWidth>(Tail<kWidth>(x + i, n - i, 0.0f).values), last, odd));
    for (int64_t k = 0; i + k < n; ++k) out[i + k] = rest[k];
  }
  return sum_of((even.low + even.high) + (odd.low + odd.high));
}

template <FakeKind kKind>
QUARK_INLINE void kind_values(const float* x, float* out, int64_t n, const FakeStep& step) {
  if (step.inverse != 0) return lane_values<FakeLanes<kKind, true>>(x, out, n, step);
  lane_values<FakeLanes<kKind, false>>(x, out, n, step);
}

template <FakeKind kKind>
QUARK_INLINE double kind_gradients(const float* x, const float* gradient, float* out, int64_t n,
                                   const FakeStep& step) {
  if (step.inverse != 0) return lane_gradients<FakeLanes<kKind, true>>(x, gradient, out, n, step);
  return lane_gradients<FakeLanes<kKind, false>>(x, gradient, out, n, step);
}

inline void fake_values(FakeKind kind, const float* x, float* out, int64_t n, const FakeStep& step) {
  if (kind == FakeKind::kAffine) return kind_values<FakeKind::kAffine>(x, out, n, step);
  if (kind == FakeKind::kStep) return kind_values<FakeKind::kStep>(x, out, n, step);
  kind_values<FakeKind::kThreshold>(x, out, n, step);
}

inline double fake_gradients(FakeKind kind, const float* x, const float* gradient, float* out, int64_t n,
                             const FakeStep& step) {
  if (kind == FakeKind::kAffine) return kind_gradients<FakeKind::kAffine>(x, gradient, out, n, step);
  if (kind == FakeKind::kStep) return kind_gradients<FakeKind::kStep>(x, gradient, out, n, step);
  return kind_gradients<FakeKind::kThreshold>(x, gradient, out, n, step);
}

FakeQuantizeKernels fake_quantize_kernels() { return {fake_values, fake_gradients}; }

}  // namespace QUARK_ISA
}  // namespace quark
