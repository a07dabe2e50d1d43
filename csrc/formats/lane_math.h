// The arithmetic of block formats on W lanes at a time; src/quark/formats/block.py says the same in array operations.
//
//     e = exponent_of(amax);   out = 2^e * round(x * 2^-e), saturating
//     with float scales:   d = t * round(amax / highest / t);   out = d * round(x / d), saturating
//
// Every lane carries its own scale, so the same functions serve blocks along lanes and blocks across them.

#include "block_parameters.h"

namespace quark {
namespace QUARK_ISA {

constexpr int32_t kMagnitude = 0x7FFFFFFF;
constexpr int32_t kInfinity = 0x7F800000;
constexpr int32_t kSmallestNormal = 0x00800000;

// How a lane finds the spacing of its grid.
enum class Spacing { kFloat, kUniform, kSubBlocks };

// Which of the parameters are known when the code is compiled.
template <Spacing kSpacingT, bool kHalfEvenT, bool kPassthroughT, bool kCarryT, bool kFloatScaleT>
struct Policy {
  static constexpr Spacing kSpacing = kSpacingT;
  static constexpr bool kHalfEven = kHalfEvenT;
  static constexpr bool kPassthrough = kPassthroughT;
  static constexpr bool kCarry = kCarryT;
  static constexpr bool kFloatScale = kFloatScaleT;
};

QUARK_INLINE float exp2_scalar(int exponent) { return bit_cast<float>((exponent + 127) << 23); }  // normal results only

// What the arithmetic uses of the parameters. Plain data of the same layout wherever it is compiled: a GPU gets a copy.
struct LaneConstants {
  int32_t increment;
  int32_t carry_step;
  int32_t max_exponent;
  int32_t max_shift;
  float magic;  // times the unit: what rounds by being added and taken away
  float half;   // times the unit: half the spacing
  float smallest_unit;
  float lowest;
  float highest;
  float scale_magic;
  float scale_smallest_unit;
  float scale_highest;
  float tensor_scale;
  int32_t tie_sign;  // what a tie takes of the bits of its number: the sign, or nothing
  bool flush;

  explicit LaneConstants(const BlockParameters& p)
      : increment(exponent_increment(p)),
        carry_step(1 << (22 - p.mantissa_bits)),
        max_exponent(p.max_exponent),
        max_shift(p.max_shift),
        magic(1.5f * exp2_scalar(23 - p.mantissa_bits)),
        half(exp2_scalar(-p.mantissa_bits - 1)),
        smallest_unit(exp2_scalar(p.min_exponent)),
        lowest(p.lowest),
        highest(p.highest),
        scale_magic(1.5f * exp2_scalar(23 - p.scale_mantissa_bits)),
        scale_smallest_unit(exp2_scalar(p.scale_min_exponent)),
        scale_highest(p.scale_highest),
        tensor_scale(p.tensor_scale),
        tie_sign(p.rounding == Rounding::kHalfUp ? 0 : ~kMagnitude),
        flush(p.flush_subnormals != 0) {}
};

template <int W, class P>
struct LaneMath : LaneConstants {
  typedef FloatsOf<W> F;
  typedef IntsOf<W> I;

  explicit LaneMath(const BlockParameters& p) : LaneConstants(p) {}
  QUARK_INLINE explicit LaneMath(const LaneConstants& constants) : LaneConstants(constants) {}

  // The bits of |x|, to find the largest by integer comparison: NaN and Inf come out on top, or count as zero.
  QUARK_INLINE I magnitude(F x) const {
    const I bits = bit_cast<I>(x) & kMagnitude;
    if constexpr (P::kPassthrough) return bits < kInfinity ? bits : splat_int<W>(0);
    return bits;
  }

  // The bits of x where it is positive; as integers, those of negative numbers are below all of them.
  QUARK_INLINE I positive_bits(F x, I magnitude) const {
    if constexpr (P::kPassthrough) return magnitude > 0 ? bit_cast<I>(x) : splat_int<W>(0);
    return bit_cast<I>(x);
  }

  // ---- scales ----
  QUARK_INLINE I rule_exponent(I amax) const {
    if (increment != 0) amax = carried(amax, increment);
    return (amax >> 23) - (127 + max_exponent);
  }

  // The bits of a magnitude, so far up that they reach the next exponent where the rule wants it.
  static QUARK_INLINE I carried(I amax, int32_t step) {
    const I bounded = minimum_int<W>(amax, splat_int<W>(kInfinity));
    // of the subnormals only [2^-127, 2^-126) matters: a binade with half as many mantissa steps
    return bounded + (bounded < kSmallestNormal ? splat_int<W>(step >> 1) : splat_int<W>(step));
  }

  static QUARK_INLINE I confine(I exponent) {
    return minimum_int<W>(maximum_int<W>(exponent, splat_int<W>(-127)), splat_int<W>(127));
  }

  // 2^exponent for exponents from -128 to 127, spelled out in bits where it is subnormal.
  static QUARK_INLINE F exp2(I exponent) {
    I bits = exponent > -127 ? to_exponent_field(exponent + 127) : splat_int<W>(0x00400000);
    if constexpr (P::kCarry) bits = exponent > -128 ? bits : splat_int<W>(0x00200000);
    return bit_cast<F>(bits);
  }

  // A shift that may be asked for what the caller does not use: negative numbers, where C++ leaves it undefined.
  static QUARK_INLINE I to_exponent_field(I biased) {
    if constexpr (W == 1) {
      return static_cast<int32_t>(static_cast<uint32_t>(biased) << 23);
    } else {
      return biased << 23;
    }
  }

  // A block's scale, its inverse and exponent; in a block with NaN or Inf the scale is NaN, and with it every product.
  struct Scale {
    F inverse;  // a float scale itself, by which is divided
    F scale;
    F second_scale;  // used where carrying may reach 2^128, which is no float
    I exponent;
  };

  // `largest` has the bits of the largest positive value, and matters where it may carry.
  QUARK_INLINE Scale scale_of(I amax, I largest) const {
    if constexpr (P::kFloatScale) return float_scale(amax, 1.0f);
    I exponent = confine(rule_exponent(amax));
    if constexpr (P::kCarry) {
      // Only a positive element can round past the top code, from half a spacing below it, whatever the rounding mode.
      const I needed = (carried(largest, carry_step) >> 23) - (127 + max_exponent);
      exponent = maximum_int<W>(exponent, needed);
    }
    return at_exponent(exponent, amax);
  }

  // The tensor's scale times the number of the scale's format nearest to what the block wants, times `factor`.
  QUARK_INLINE Scale float_scale(I amax, float factor) const { return at_scale(rounded_scale(amax, factor), amax); }

  QUARK_INLINE F rounded_scale(I amax, float factor) const {
    const I finite = amax < kInfinity ? amax : splat_int<W>(0);
    const F wanted = bit_cast<F>(finite) / splat<W>(highest) / splat<W>(tensor_scale);
    // without a tensor scale, in a tensor of zeros, what is wanted may be NaN: the limit will do, the product is zero
    const F bounded = minimum<W>(wanted * factor, splat<W>(scale_highest));
    const F power = bit_cast<F>(bit_cast<I>(bounded) & kInfinity);
    const F shift = maximum<W>(power, splat<W>(scale_smallest_unit)) * scale_magic;
    return ((bounded + shift) - shift) * tensor_scale;
  }

  QUARK_INLINE Scale at_scale(F scale, I amax) const {
    Scale s;
    s.scale = scale;
    s.inverse = scale;
    s.second_scale = splat<W>(1.0f);
    s.exponent = splat_int<W>(0);
    if constexpr (!P::kPassthrough) {
      s.scale = bit_cast<F>(amax < kInfinity ? bit_cast<I>(s.scale) : splat_int<W>(0x7FC00000));
    }
    return s;
  }

  QUARK_INLINE Scale at_exponent(I exponent, I amax) const {
    Scale s;
    s.exponent = exponent;
    s.inverse = exp2(-exponent);
    s.scale = exp2(P::kCarry ? minimum_int<W>(exponent, splat_int<W>(127)) : exponent);
    s.second_scale = exponent > 127 ? splat<W>(2.0f) : splat<W>(1.0f);
    if constexpr (!P::kPassthrough) {
      s.scale = bit_cast<F>(amax < kInfinity ? bit_cast<I>(s.scale) : splat_int<W>(0x7FC00000));
    }
    return s;
  }

  // The unit of a sub-block: 2^-D, D the distance of its exponent to the block's.
  QUARK_INLINE F sub_block_unit(I amax, I exponent) const {
    const I distance = exponent - rule_exponent(amax);
    const I shift = minimum_int<W>(maximum_int<W>(distance, splat_int<W>(0)), splat_int<W>(max_shift));
    return bit_cast<F>(to_exponent_field(127 - shift));
  }

  // ---- elements ----
  QUARK_INLINE F round(F y, F unit) const {
    const F shift = unit * magic;
    const F rounded = (y + shift) - shift;
    if constexpr (P::kHalfEven) return rounded;
    // half way to the next of the grid in the direction in which ties go: that of y, or up
    const F tie = bit_cast<F>(bit_cast<I>(unit * half) | (bit_cast<I>(y) & tie_sign));
    const F rest = y - rounded;
    return rest == tie ? rounded + (rest + rest) : rounded;
  }

  // x in units of its scale, rounded to the element's grid; `unit` matters for sub-blocks only.
  QUARK_INLINE F element(F x, F inverse, F unit) const {
    if constexpr (P::kSpacing == Spacing::kSubBlocks) {
      if (flush) x = (bit_cast<I>(x) & kInfinity) != 0 ? x : F{};
    }
    if constexpr (P::kFloatScale) return rounded_element(x / inverse, unit);
    return rounded_element(x * inverse, unit);
  }

  // y rounded to the element's grid.
  QUARK_INLINE F rounded_element(F y, F unit) const {
    F high = splat<W>(highest);
    F low = splat<W>(lowest);
    // y may be Inf, or NaN at a scale of 0; the limits are on the grid, so nothing rounds past them
    if constexpr (P::kFloatScale) y = maximum<W>(minimum<W>(y, high), low);
    if constexpr (P::kSpacing == Spacing::kFloat) {
      unit = maximum<W>(bit_cast<F>(bit_cast<I>(y) & kInfinity), splat<W>(smallest_unit));
    } else if constexpr (P::kSpacing == Spacing::kUniform) {
      unit = splat<W>(smallest_unit);
    } else {
      high *= unit;
      low = -high;  // sub-blocks hold signs and magnitudes
    }
    if constexpr (P::kFloatScale) return round(y, unit);
    return maximum<W>(minimum<W>(round(y, unit), high), low);
  }

  QUARK_INLINE F quantize(F x, const Scale& s, F unit) const {
    return value_of(x, element(x, s.inverse, unit), s);
  }

  // The value of x's element.
  QUARK_INLINE F value_of(F x, F rounded, const Scale& s) const {
    F value = rounded * s.scale;
    if constexpr (P::kCarry) value *= s.second_scale;
    if constexpr (P::kPassthrough) value = (bit_cast<I>(x) & kMagnitude) < kInfinity ? value : x;
    return value;
  }
};

}  // namespace QUARK_ISA
}  // namespace quark
