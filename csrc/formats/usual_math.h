// The arithmetic of lane_math.h in fewer steps, for usual blocks: those without NaN or Inf and, where scales are powers
// of two, far from the ends of float32's range. There nothing is subnormal or overflows, so scaling by 2^-e and back
// would change no bit and is left out:
//
//     out = round(x) to multiples of 2^e * spacing, saturating at 2^e * highest
//
// Included after lane_math.h by the per-ISA kernel files only.

namespace quark {
namespace QUARK_ISA {

template <int W, class P>
struct UsualMath : LaneMath<W, P> {
  typedef LaneMath<W, P> Base;
  typedef FloatsOf<W> F;
  typedef IntsOf<W> I;

  // The largest magnitude of a usual block lies in [begin, kEnd), both as the bits of a float. Below 2^100 the sums
  // that round are finite.
  static constexpr int32_t kEnd = P::kFloatScale ? kInfinity : (127 + 100) << 23;
  int32_t begin;
  int32_t element_exponent;  // max_exponent, in units of a float's exponent field
  int32_t shift_exponent;    // max_shift, likewise

  explicit UsualMath(const BlockParameters& p)
      : Base(p), begin(begin_of(p)), element_exponent(p.max_exponent << 23), shift_exponent(p.max_shift << 23) {}

  // From here on the finest spacing is at least 2^-123, and subnormals round to 0 whether they are flushed or not.
  static int32_t begin_of(const BlockParameters& p) {
    const int32_t finest = (p.min_exponent < 0 ? p.min_exponent : 0) - p.mantissa_bits;
    if (finest < -100) return kEnd;  // the general arithmetic may round twice: when it scales, and to the spacing
    return (4 + p.max_exponent - finest + p.max_shift) << 23;
  }

  // The bits of |x|; NaN and Inf come out on top.
  static QUARK_INLINE I magnitude(F x) { return bit_cast<I>(x) & kMagnitude; }

  // A comparison: true in the lanes whose block, with that largest magnitude, is not a usual one. A block of zeros is.
  QUARK_INLINE I is_unusual(I most) const {
    if constexpr (P::kFloatScale) return most >= kEnd;
    return (most >= kEnd) | ((most < begin) & (most != 0));
  }

  // A block's scale: 2^e or a float. For a block with sub-blocks, the smallest scale that one of them may have.
  // `largest` has the bits of the largest positive value.
  QUARK_INLINE F usual_scale(I most, I largest) const {
    if constexpr (P::kFloatScale) return Base::rounded_scale(most, 1.0f);
    // bounded for the blocks that are not usual: the sums would overflow
    I reached = minimum_int<W>(most, splat_int<W>(kEnd)) + Base::increment;
    if constexpr (P::kCarry) {
      reached = maximum_int<W>(reached, minimum_int<W>(largest, splat_int<W>(kEnd)) + Base::carry_step);
    }
    const I exponent = maximum_int<W>(reached, splat_int<W>(begin)) & kInfinity;
    return bit_cast<F>(exponent - (element_exponent + shift_exponent));
  }

  // A sub-block's scale, from its own largest magnitude and the smallest scale in its block.
  QUARK_INLINE F usual_sub_scale(I most, F smallest) const {
    const I own = ((most + Base::increment) & kInfinity) - element_exponent;
    return bit_cast<F>(maximum_int<W>(own, bit_cast<I>(smallest)));
  }

  QUARK_INLINE F usual_quantize(F x, F scale) const {
    if constexpr (P::kFloatScale) {
      // saturated first: at a scale of 0 the quotient is Inf or NaN
      const F y = maximum<W>(minimum<W>(x / scale, splat<W>(Base::highest)), splat<W>(Base::lowest));
      return Base::round(y, unit_at(y, splat<W>(Base::smallest_unit))) * scale;
    }
    const F high = scale * Base::highest;
    if constexpr (P::kSpacing == Spacing::kSubBlocks) {
      return maximum<W>(minimum<W>(Base::round(x, scale), high), -high);
    }
    const F rounded = Base::round(x, unit_at(x, scale * Base::smallest_unit));
    return maximum<W>(minimum<W>(rounded, high), scale * Base::lowest);
  }

  static QUARK_INLINE F unit_at(F y, F smallest) {
    if constexpr (P::kSpacing != Spacing::kFloat) return smallest;
    return maximum<W>(bit_cast<F>(bit_cast<I>(y) & kInfinity), smallest);
  }
};

}  // namespace QUARK_ISA
}  // namespace quark
