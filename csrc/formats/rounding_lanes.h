// Rounding to whole numbers in vectors. Included after lanes.h by the per-ISA files only.

namespace quark {
namespace QUARK_ISA {

// Half to even, of any size: from 2^23 on there are whole numbers only.
QUARK_INLINE FloatsOf<kWidth> round_half_even(FloatsOf<kWidth> v) {
#if defined(__AVX512F__)
  return _mm512_maskz_roundscale_ps(static_cast<__mmask16>(-1), v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const IntsOf<kWidth> bits = bit_cast<IntsOf<kWidth>>(v);
  const IntsOf<kWidth> magnitude = bits & 0x7FFFFFFF;
  const FloatsOf<kWidth> spacing_one = bit_cast<FloatsOf<kWidth>>((bits ^ magnitude) | 0x4B000000);  // 2^23, or -2^23
  return magnitude < 0x4B000000 ? (v + spacing_one) - spacing_one : v;
#endif
}

}  // namespace QUARK_ISA
}  // namespace quark
