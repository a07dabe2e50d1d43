// Exponentials, logarithms and square roots in vectors. Included after lanes.h and rounding_lanes.h by the per-ISA files
// only. Errors are of one or two units in the last place.

namespace quark {
namespace QUARK_ISA {

// a * b + c, rounded once where the processor can.
QUARK_INLINE FloatsOf<kWidth> fused(FloatsOf<kWidth> a, FloatsOf<kWidth> b, FloatsOf<kWidth> c) {
#if defined(__AVX512F__)
  return _mm512_maskz_fmadd_ps(static_cast<__mmask16>(-1), a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

QUARK_INLINE FloatsOf<kWidth> square_root(FloatsOf<kWidth> v) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_ps(static_cast<__mmask16>(-1), v);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(v);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(v);
#else
  for (int lane = 0; lane < kWidth; ++lane) v[lane] = __builtin_sqrtf(v[lane]);
  return v;
#endif
}

// e^x, with x confined to where the result is a normal number.
QUARK_INLINE FloatsOf<kWidth> exponential(FloatsOf<kWidth> x) {
  typedef FloatsOf<kWidth> F;
  x = minimum<kWidth>(splat<kWidth>(88.0f), maximum<kWidth>(splat<kWidth>(-87.0f), x));
  const F turns = round_half_even(x * splat<kWidth>(1.44269504f));
  // x - turns * ln 2, with ln 2 in two parts, of which the first is exact in products with small whole numbers
  F r = x - turns * splat<kWidth>(0.693359375f);
  r -= turns * splat<kWidth>(-2.12194440e-4f);
  F sum = splat<kWidth>(1.9875691500e-4f);
  sum = fused(sum, r, splat<kWidth>(1.3981999507e-3f));
  sum = fused(sum, r, splat<kWidth>(8.3334519073e-3f));
  sum = fused(sum, r, splat<kWidth>(4.1665795894e-2f));
  sum = fused(sum, r, splat<kWidth>(1.6666665459e-1f));
  sum = fused(sum, r, splat<kWidth>(5.0000001201e-1f));
  const F near_one = fused(sum, r * r, r) + splat<kWidth>(1.0f);
  const IntsOf<kWidth> whole = __builtin_convertvector(turns, IntsOf<kWidth>);
  return near_one * bit_cast<F>((whole + 127) << 23);
}

// The logarithm of a positive normal number.
QUARK_INLINE FloatsOf<kWidth> logarithm(FloatsOf<kWidth> x) {
  typedef FloatsOf<kWidth> F;
  // x = 2^e * (1 + m), with 1 + m from sqrt(1/2) to sqrt(2)
  const IntsOf<kWidth> bits = bit_cast<IntsOf<kWidth>>(x) - 0x3F3504F3;
  const F e = __builtin_convertvector(bits >> 23, F);
  const F m = bit_cast<F>((bits & 0x007FFFFF) + 0x3F3504F3) - splat<kWidth>(1.0f);
  F sum = splat<kWidth>(7.0376836292e-2f);
  sum = fused(sum, m, splat<kWidth>(-1.1514610310e-1f));
  sum = fused(sum, m, splat<kWidth>(1.1676998740e-1f));
  sum = fused(sum, m, splat<kWidth>(-1.2420140846e-1f));
  sum = fused(sum, m, splat<kWidth>(1.4249322787e-1f));
  sum = fused(sum, m, splat<kWidth>(-1.6668057665e-1f));
  sum = fused(sum, m, splat<kWidth>(2.0000714765e-1f));
  sum = fused(sum, m, splat<kWidth>(-2.4999993993e-1f));
  sum = fused(sum, m, splat<kWidth>(3.3333331174e-1f));
  const F square = m * m;
  F result = sum * m * square + e * splat<kWidth>(-2.12194440e-4f);
  result = result - splat<kWidth>(0.5f) * square + m;
  return result + e * splat<kWidth>(0.693359375f);
}

// base^exponent for a base from 0 to 1; the error grows with the distance of the result from 1.
QUARK_INLINE FloatsOf<kWidth> power(FloatsOf<kWidth> base, FloatsOf<kWidth> exponent) {
  return exponential(exponent * logarithm(maximum<kWidth>(splat<kWidth>(1.17549435e-38f), base)));
}

}  // namespace QUARK_ISA
}  // namespace quark
