// The arithmetic of block formats on W lanes at a time; src/quark/formats/block.py says the same in array operations.
//
//     e = exponent_of(amax);   out = 2^e * round(x * 2^-e), saturating
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
template <Spacing kSpacingT, bool kHalfEvenT, bool kPassthroughT, bool kCarryT>
struct Policy {
  static constexpr Spacing kSpacing = kSpacingT;
  static constexpr bool kHalfEven = kHalfEvenT;
  static constexpr bool kPassthrough = kPassthroughT;
  static constexpr bool kCarry = kCarryT;
};

inline float exp2_scalar(int exponent) { return bit_cast<float>((exponent + 127) << 23); }  // normal results only

template <int W, class P>
struct LaneMath {
  typedef FloatsOf<W> F;
  typedef IntsOf<W> I;

  int32_t increment;
  int32_t max_exponent;
  int32_t max_shift;
  float magic;  // times the unit: what rounds by being added and taken away
  float half;   // times the unit: half the spacing
  float smallest_unit;
  float lowest;
  float highest;
  bool flush;
  bool half_up;

  explicit LaneMath(const BlockParameters& p)
      : increment(exponent_increment(p)),
        max_exponent(p.max_exponent),
        max_shift(p.max_shift),
        magic(1.5f * exp2_scalar(23 - p.mantissa_bits)),
        half(exp2_scalar(-p.mantissa_bits - 1)),
        smallest_unit(exp2_scalar(p.min_exponent)),
        lowest(p.lowest),
        highest(p.highest),
        flush(p.flush_subnormals != 0),
        half_up(p.rounding == Rounding::kHalfUp) {}

  // The bits of |x|, to find the largest by integer comparison: NaN and Inf come out on top, or count as zero.
  I magnitude(F x) const {
    const I bits = bit_cast<I>(x) & kMagnitude;
    if constexpr (P::kPassthrough) return bits < kInfinity ? bits : splat_int<W>(0);
    return bits;
  }

  // ---- scales ----
  I rule_exponent(I amax) const {
    if (increment != 0) {
      const I bounded = minimum_int<W>(amax, splat_int<W>(kInfinity));
      // of the subnormals only [2^-127, 2^-126) matters: a binade with half as many mantissa steps
      amax = bounded + (bounded < kSmallestNormal ? splat_int<W>(increment >> 1) : splat_int<W>(increment));
    }
    return (amax >> 23) - (127 + max_exponent);
  }

  static I confine(I exponent) {
    return minimum_int<W>(maximum_int<W>(exponent, splat_int<W>(-127)), splat_int<W>(127));
  }

  // 2^exponent for exponents from -128 to 127, spelled out in bits where it is subnormal.
  static F exp2(I exponent) {
    I bits = exponent > -127 ? to_exponent_field(exponent + 127) : splat_int<W>(0x00400000);
    if constexpr (P::kCarry) bits = exponent > -128 ? bits : splat_int<W>(0x00200000);
    return bit_cast<F>(bits);
  }

  // A shift that may be asked for what the caller does not use: negative numbers, where C++ leaves it undefined.
  static I to_exponent_field(I biased) {
    if constexpr (W == 1) {
      return static_cast<int32_t>(static_cast<uint32_t>(biased) << 23);
    } else {
      return biased << 23;
    }
  }

  // A block's scale, its inverse and exponent; in a block with NaN or Inf the scale is NaN, and with it every product.
  struct Scale {
    F inverse;
    F scale;
    F second_scale;  // only where carrying may reach 2^128, which is no float
    I exponent;
  };

  // `largest` is the largest signed value, used where it may carry.
  Scale scale_of(I amax, F largest) const {
    I exponent = confine(rule_exponent(amax));
    if constexpr (P::kCarry) {
      const F rounded = round(largest * exp2(-exponent), splat<W>(smallest_unit));
      exponent += rounded > highest ? splat_int<W>(1) : splat_int<W>(0);
    }
    return at_exponent(exponent, amax);
  }

  Scale at_exponent(I exponent, I amax) const {
    Scale s;
    s.exponent = exponent;
    s.inverse = exp2(-exponent);
    I first = exponent;
    if constexpr (P::kCarry) {
      first = exponent >> 1;
      s.second_scale = exp2(exponent - first);
    } else {
      s.second_scale = F{};
    }
    s.scale = exp2(first);
    if constexpr (!P::kPassthrough) {
      s.scale = bit_cast<F>(amax < kInfinity ? bit_cast<I>(s.scale) : splat_int<W>(0x7FC00000));
    }
    return s;
  }

  // The unit of a sub-block: 2^-D, D the distance of its exponent to the block's.
  F sub_block_unit(I amax, I exponent) const {
    const I distance = exponent - rule_exponent(amax);
    const I shift = minimum_int<W>(maximum_int<W>(distance, splat_int<W>(0)), splat_int<W>(max_shift));
    return exp2(-shift);
  }

  // ---- elements ----
  F round(F y, F unit) const {
    const F shift = unit * magic;
    const F rounded = (y + shift) - shift;
    if constexpr (P::kHalfEven) return rounded;
    const F rest = y - rounded;
    const F tie = unit * half;
    if (half_up) return rest == tie ? rounded + (rest + rest) : rounded;
    const F size = bit_cast<F>(bit_cast<I>(rest) & kMagnitude);
    const I same_sign = ~(bit_cast<I>(rest) ^ bit_cast<I>(y));  // negative where the signs agree
    const F away = size == tie ? rest + rest : F{};
    return rounded + (same_sign < 0 ? away : F{});
  }

  // x in units of its scale, rounded to the element's grid; `unit` matters for sub-blocks only.
  F element(F x, F inverse, F unit) const {
    if constexpr (P::kSpacing == Spacing::kSubBlocks) {
      if (flush) x = (bit_cast<I>(x) & kMagnitude) < kSmallestNormal ? F{} : x;
    }
    const F y = x * inverse;
    F low = splat<W>(lowest);
    F high = splat<W>(highest);
    if constexpr (P::kSpacing == Spacing::kFloat) {
      unit = maximum<W>(bit_cast<F>(bit_cast<I>(y) & kInfinity), splat<W>(smallest_unit));
    } else if constexpr (P::kSpacing == Spacing::kUniform) {
      unit = splat<W>(smallest_unit);
    } else {
      low *= unit;
      high *= unit;
    }
    return maximum<W>(minimum<W>(round(y, unit), high), low);
  }

  F quantize(F x, const Scale& s, F unit) const {
    F value = element(x, s.inverse, unit) * s.scale;
    if constexpr (P::kCarry) value *= s.second_scale;
    if constexpr (P::kPassthrough) value = (bit_cast<I>(x) & kMagnitude) < kInfinity ? value : x;
    return value;
  }
};

}  // namespace QUARK_ISA
}  // namespace quark
