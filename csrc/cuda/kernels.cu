// The operators on a GPU. Compiled to PTX by tools/cuda_kernels.py and loaded one kernel at a time by driver.cc: every
// kernel has to be complete in itself, without tables or variables in memory.
//
// The arithmetic is that of the processor, from the same text: formats/lane_math.h and formats/linear.h. What differs is
// how a tensor is walked through:
//
//     rows     blocks along neighbours in memory: a group of lanes holds a block, in vectors of 16 bytes
//     columns  blocks across rows: a thread walks down a column and keeps it in registers
//     any      every other block size, length, alignment, and rule mse: a group of lanes (one, across rows) per block
//
// tests/native/cuda_emulator compiles this file for the processor.
#include "arguments.h"
//
#include "../formats/linear.h"

namespace quark {
namespace gpu {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr int32_t kQuietNan = 0x7FC00000;  // what the processor's arithmetic gives; a GPU's own NaN has other bits
constexpr uint16_t kHalfQuietNan = 0x7E00;

#if defined(__CUDACC__)
__device__ __forceinline__ float widen_half(uint16_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
__device__ __forceinline__ uint16_t narrow_to_half(float value) {
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
#endif

// ---- what a tensor holds ----
struct Float32 {
  typedef float Element;
  static __device__ __forceinline__ float widen(float value) { return value; }
  // `value` is what became of x.
  template <class P>
  static __device__ __forceinline__ float narrow(float value, float, bool is_bad) {
    if (!P::kPassthrough && is_bad) return bit_cast<float>(kQuietNan);
    return value;
  }
};

struct Float16 {
  typedef uint16_t Element;
  static __device__ __forceinline__ float widen(uint16_t half) { return widen_half(half); }
  template <class P>
  static __device__ __forceinline__ uint16_t narrow(float value, float x, bool is_bad) {
    const uint16_t half = narrow_to_half(value);
    return (P::kPassthrough ? x != x : is_bad) ? kHalfQuietNan : half;
  }
};

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack {
  Element values[kCount];
};

// As formats/block_kernels.h has it in namespaces of its own.
template <Spacing kSpacingT, bool kCarryT, bool kFloatScaleT, bool kHalfEvenT, bool kPassthroughT>
using PolicyOf = Policy<kSpacingT, kHalfEvenT, kPassthroughT, kCarryT, kFloatScaleT>;

template <class P>
__device__ __forceinline__ LaneConstants constants_of(const BlockArguments& a) {
  LaneConstants constants = a.constants;
  if (P::kFloatScale && a.largest != nullptr) {
    constants.tensor_scale = bit_cast<float>(*a.largest) / a.tensor_scale_divisor;
  }
  return constants;
}

// Only block floating point is rounded to bfloat16 first, and that has neither elements nor scales of a float format.
template <class P>
constexpr bool kMayRoundFirst = P::kSpacing != Spacing::kFloat && !P::kFloatScale;

template <class P>
__device__ __forceinline__ bool rounds_first(const BlockArguments& a) {
  return kMayRoundFirst<P> && a.round_to_bfloat16;
}

// The largest value within each group of `lanes` neighbours, in all of them.
__device__ __forceinline__ int32_t group_maximum(int32_t value, int lanes) {
  for (int distance = lanes >> 1; distance > 0; distance >>= 1) {
    const int32_t other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// Division by one scale after another is most of the arithmetic of float scales. Where numbers are neither very large nor
// very small, this is the same quotient for a few multiplications: two steps of Newton's towards x / d from the
// reciprocal of d, with remainders that are exact. A quotient that is so small that they are not rounds to 0 anyway.
__device__ __forceinline__ bool is_tame(float d, int32_t most) {
  constexpr int32_t kSmall = (127 - 60) << 23;
  constexpr int32_t kLarge = (127 + 60) << 23;
  const int32_t bits = bit_cast<int32_t>(d);
  return bits > kSmall && bits < kLarge && most < kLarge;
}
__device__ __forceinline__ float tame_quotient(float x, float d, float reciprocal) {
  float quotient = x * reciprocal;
  quotient = fmaf(fmaf(-quotient, d, x), reciprocal, quotient);
  return fmaf(fmaf(-quotient, d, x), reciprocal, quotient);
}

// What a block's elements are quantized with.
template <class P>
struct BlockScale {
  typename LaneMath<1, P>::Scale scale;
  float reciprocal;  // of a float scale that is_tame, else 0
  bool is_bad;       // NaN or Inf in a block that they spoil

  __device__ __forceinline__ BlockScale(const LaneMath<1, P>& math, int32_t most, int32_t largest)
      : scale(math.scale_of(most, largest)), reciprocal(0.0f), is_bad(most >= kInfinity) {
    if (P::kFloatScale && is_tame(scale.inverse, most)) reciprocal = 1.0f / scale.inverse;
  }

  __device__ __forceinline__ float quantize(const LaneMath<1, P>& math, float x, float unit) const {
    if (P::kFloatScale && reciprocal != 0.0f) {
      return math.value_of(x, math.rounded_element(tame_quotient(x, scale.inverse, reciprocal), unit), scale);
    }
    return math.quantize(x, scale, unit);
  }
};

// The unit of two neighbours of a block that are a sub-block; it matters for sub-blocks only.
template <class P>
__device__ __forceinline__ float pair_unit(const LaneMath<1, P>& math, float first, float second, int32_t exponent) {
  if (P::kSpacing != Spacing::kSubBlocks) return 1.0f;
  return math.sub_block_unit(maximum_int<1>(math.magnitude(first), math.magnitude(second)), exponent);
}

// Thread blocks go through the tensor from its end: what was read last, to find its largest value, is still cached.
__device__ __forceinline__ int64_t block_index() { return static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x; }

// ---- rows ----
template <class P, class S>
__device__ __forceinline__ void run_rows(const BlockArguments& a) {
  typedef typename S::Element Element;
  constexpr int kElements = kVectorBytes / sizeof(Element);
  typedef Pack<Element, kElements> Vector;

  const LaneMath<1, P> math(constants_of<P>(a));
  const uint32_t first = static_cast<uint32_t>(block_index()) * (kThreads * kVectorsPerThread) + threadIdx.x;
  Vector vectors[kVectorsPerThread];
  int64_t at[kVectorsPerThread];
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
    const uint32_t item = first + v * kThreads;
    const uint32_t lane = item & (a.lanes - 1);
    uint32_t block = item >> a.lanes_log2;
    int64_t row_start = 0;
    if (a.outer > 1) {
      const uint32_t row = block / static_cast<uint32_t>(a.blocks_in_row);
      block -= row * static_cast<uint32_t>(a.blocks_in_row);
      row_start = row * a.n;
    }
    const int64_t in_row = (static_cast<int64_t>(block) << a.lanes_log2 | lane) * kElements;
    at[v] = item < a.items && in_row < a.n ? row_start + in_row : -1;
    if (at[v] >= 0) {
      vectors[v] = *reinterpret_cast<const Vector*>(static_cast<const Element*>(a.in) + at[v]);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) vectors[v].values[i] = 0;
    }
  }
  float x[kVectorsPerThread][kElements];
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[v][i] = S::widen(vectors[v].values[i]);
  }
  if (rounds_first<P>(a)) {
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[v][i] = round_to_bfloat16(x[v][i]);
    }
  }
  int32_t most[kVectorsPerThread];
  int32_t largest[kVectorsPerThread];
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
    most[v] = 0;
    largest[v] = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int32_t magnitude = math.magnitude(x[v][i]);
      most[v] = maximum_int<1>(most[v], magnitude);
      if (P::kCarry) largest[v] = maximum_int<1>(largest[v], math.positive_bits(x[v][i], magnitude));
    }
    most[v] = group_maximum(most[v], a.lanes);
    if (P::kCarry) largest[v] = group_maximum(largest[v], a.lanes);
  }
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
    const BlockScale<P> scale(math, most[v], largest[v]);
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
      const float unit = pair_unit(math, x[v][i], x[v][i + 1], scale.scale.exponent);
#pragma unroll
      for (int k = i; k < i + 2; ++k) {
        const float value = scale.quantize(math, x[v][k], unit);
        vectors[v].values[k] = S::template narrow<P>(value, x[v][k], scale.is_bad);
      }
    }
    if (at[v] >= 0) *reinterpret_cast<Vector*>(static_cast<Element*>(a.out) + at[v]) = vectors[v];
  }
}

// ---- columns ----
template <class P, class S>
__device__ __forceinline__ void run_columns(const BlockArguments& a) {
  typedef typename S::Element Element;
  constexpr int kChunk = 8;

  const uint32_t item = static_cast<uint32_t>(block_index()) * kThreads + threadIdx.x;
  if (item >= a.items) return;
  const LaneMath<1, P> math(constants_of<P>(a));
  const uint32_t inner = static_cast<uint32_t>(a.inner);
  const uint32_t blocks = item / inner;
  const uint32_t outer = blocks / static_cast<uint32_t>(a.blocks_in_row);
  const int64_t first_row = (blocks - outer * static_cast<uint32_t>(a.blocks_in_row)) * a.block_size;
  const int rows = static_cast<int>(a.n - first_row < a.block_size ? a.n - first_row : a.block_size);
  const int64_t start = (outer * a.n + first_row) * a.inner + (item - blocks * inner);
  const Element* in = static_cast<const Element*>(a.in) + start;
  Element* out = static_cast<Element*>(a.out) + start;

  float column[kMostRows];
#pragma unroll
  for (int chunk = 0; chunk < kMostRows; chunk += kChunk) {
    if (chunk < a.block_size) {
#pragma unroll
      for (int row = chunk; row < chunk + kChunk; ++row) {
        column[row] = row < rows ? S::widen(in[static_cast<int64_t>(row) * inner]) : 0.0f;
      }
    }
  }
  if (rounds_first<P>(a)) {
#pragma unroll
    for (int chunk = 0; chunk < kMostRows; chunk += kChunk) {
      if (chunk < a.block_size) {
#pragma unroll
        for (int row = chunk; row < chunk + kChunk; ++row) column[row] = round_to_bfloat16(column[row]);
      }
    }
  }
  int32_t most = 0;
  int32_t largest = 0;
#pragma unroll
  for (int chunk = 0; chunk < kMostRows; chunk += kChunk) {
    if (chunk < a.block_size) {
#pragma unroll
      for (int row = chunk; row < chunk + kChunk; ++row) {
        const int32_t magnitude = math.magnitude(column[row]);
        most = maximum_int<1>(most, magnitude);
        if (P::kCarry) largest = maximum_int<1>(largest, math.positive_bits(column[row], magnitude));
      }
    }
  }
  const BlockScale<P> scale(math, most, largest);
#pragma unroll
  for (int chunk = 0; chunk < kMostRows; chunk += kChunk) {
    if (chunk < a.block_size) {
#pragma unroll
      for (int pair = chunk; pair < chunk + kChunk; pair += 2) {
        const float unit = pair_unit(math, column[pair], column[pair + 1], scale.scale.exponent);
#pragma unroll
        for (int row = pair; row < pair + 2; ++row) {
          const float value = scale.quantize(math, column[row], unit);
          const Element result = S::template narrow<P>(value, column[row], scale.is_bad);
          if (row < rows) out[static_cast<int64_t>(row) * inner] = result;
        }
      }
    }
  }
}

// ---- any block ----
template <class P, class S>
struct AnyBlock {
  typedef typename S::Element Element;
  typedef LaneMath<1, P> Math;

  const BlockArguments& a;
  const Math math;
  const Element* in;
  Element* out;
  int64_t count;
  int lane;

  __device__ __forceinline__ float at(int64_t i) const {
    const float x = S::widen(in[i * a.inner]);
    return rounds_first<P>(a) ? round_to_bfloat16(x) : x;
  }

  // The unit of the sub-block that element i is in.
  __device__ __forceinline__ float unit_at(int64_t i, int32_t exponent) const {
    if (P::kSpacing != Spacing::kSubBlocks) return 1.0f;
    const int64_t begin = i / a.sub_block_size * a.sub_block_size;
    const int64_t end = begin + a.sub_block_size < count ? begin + a.sub_block_size : count;
    int32_t most = 0;
    for (int64_t k = begin; k < end; ++k) most = maximum_int<1>(most, math.magnitude(at(k)));
    return math.sub_block_unit(most, exponent);
  }

  // The sum of a block's squared errors at a scale, in the order of SingleBlock::squared_error: upper half onto lower
  // half of 2^k numbers. Turned around, that is a tree over bit-reversed numbers, which needs no room but a path.
  __device__ __forceinline__ double squared_error(double scale, float inverse, int32_t exponent) const {
    double path[40];
    int depth = 0;
    const uint64_t items = uint64_t{1} << a.tree_log2;
    for (uint64_t item = 0; item < items; ++item) {
      const uint64_t reversed = a.tree_log2 == 0 ? 0 : __brevll(item) >> (64 - a.tree_log2);
      const int64_t i = static_cast<int64_t>(reversed) * a.lanes + lane;
      double sum = i < count ? error_at(i, scale, inverse, exponent) : 0.0;
      for (uint64_t bits = item; bits & 1; bits >>= 1) sum = path[--depth] + sum;
      path[depth++] = sum;
    }
    double sum = path[0];
    for (int distance = a.lanes >> 1; distance > 0; distance >>= 1) {
      sum = sum + __shfl_xor_sync(kAllLanes, sum, distance);
    }
    return sum;
  }

  __device__ __forceinline__ double error_at(int64_t i, double scale, float inverse, int32_t exponent) const {
    float x = at(i);
    if (P::kSpacing == Spacing::kSubBlocks && math.flush && (bit_cast<int32_t>(x) & kMagnitude) < kSmallestNormal) {
      x = 0.0f;
    }
    const double element = static_cast<double>(math.element(x, inverse, unit_at(i, exponent)));
    const double error = element * scale - static_cast<double>(x);
    return (bit_cast<int32_t>(x) & kMagnitude) < kInfinity ? error * error : 0.0;
  }

  // Every lane of a warp comes here, also one whose block needs no search: lanes exchange numbers.
  __device__ __forceinline__ typename Math::Scale least_error(typename Math::Scale usual, int32_t most) const {
    typename Math::Scale best = usual;
    double least = 0.0;
    constexpr int kTried = P::kFloatScale ? kFactors : 3;
    for (int tried = 0; tried < kTried; ++tried) {
      typename Math::Scale scale;
      double exact;
      if constexpr (P::kFloatScale) {
        scale = math.float_scale(most, scale_factor(tried));
        exact = scale.inverse;
      } else {
        scale = math.at_exponent(Math::confine(usual.exponent + tried - 1), most);
        exact = bit_cast<double>((static_cast<int64_t>(scale.exponent) + 1023) << 52);
      }
      const double error = squared_error(exact, scale.inverse, scale.exponent);
      if (tried == 0 || error < least) {
        best = scale;
        least = error;
      }
    }
    if (most >= kInfinity) return usual;
    return best;
  }

  __device__ __forceinline__ void run() const {
    int32_t most = 0;
    int32_t largest = 0;
    for (int64_t i = lane; i < count; i += a.lanes) {
      const float x = at(i);
      const int32_t magnitude = math.magnitude(x);
      most = maximum_int<1>(most, magnitude);
      if (P::kCarry) largest = maximum_int<1>(largest, math.positive_bits(x, magnitude));
    }
    most = group_maximum(most, a.lanes);
    if (P::kCarry) largest = group_maximum(largest, a.lanes);
    auto scale = math.scale_of(most, largest);
    if (a.searches) scale = least_error(scale, most);
    for (int64_t i = lane; i < count; i += a.lanes) {
      const float x = at(i);
      const float value = math.quantize(x, scale, unit_at(i, scale.exponent));
      out[i * a.inner] = S::template narrow<P>(value, x, most >= kInfinity);
    }
  }
};

template <class P, class S>
__device__ __forceinline__ void run_any(const BlockArguments& a) {
  typedef typename S::Element Element;
  const int64_t thread = block_index() * kThreads + threadIdx.x;
  const int64_t item = thread >> a.lanes_log2;  // threads beyond the last item have a block of no elements
  const int64_t row_blocks = item / a.inner;
  const int64_t column = item - row_blocks * a.inner;
  const int64_t outer = row_blocks / a.blocks_in_row;
  const int64_t first = (row_blocks - outer * a.blocks_in_row) * a.block_size;
  const int64_t rest = item < a.items ? a.n - first : 0;
  const int64_t start = (outer * a.n + first) * a.inner + column;
  const AnyBlock<P, S> block{a,
                             LaneMath<1, P>(constants_of<P>(a)),
                             static_cast<const Element*>(a.in) + start,
                             static_cast<Element*>(a.out) + start,
                             rest < a.block_size ? rest : a.block_size,
                             static_cast<int>(thread & (a.lanes - 1))};
  block.run();
}

// ---- the largest finite magnitude of a tensor ----
template <class S>
__device__ __forceinline__ void run_largest(const LargestArguments& a) {
  typedef typename S::Element Element;
  constexpr int kElements = kVectorBytes / sizeof(Element);
  typedef Pack<Element, kElements> Vector;
  const Element* in = static_cast<const Element*>(a.in);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool is_aligned = reinterpret_cast<uintptr_t>(in) % kVectorBytes == 0;
  const int64_t whole = is_aligned ? a.count / kElements : 0;
  constexpr int kTogether = 4;  // loads under way
  int32_t most = 0;
  for (int64_t first = thread; first < whole; first += kTogether * step) {
    Vector vectors[kTogether];
#pragma unroll
    for (int v = 0; v < kTogether; ++v) {
      // beyond the end the first once more
      vectors[v] = reinterpret_cast<const Vector*>(in)[first + v * step < whole ? first + v * step : first];
    }
#pragma unroll
    for (int v = 0; v < kTogether; ++v) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const int32_t bits = bit_cast<int32_t>(S::widen(vectors[v].values[i])) & kMagnitude;
        most = maximum_int<1>(most, bits < kInfinity ? bits : 0);
      }
    }
  }
  for (int64_t i = whole * kElements + thread; i < a.count; i += step) {
    const int32_t bits = bit_cast<int32_t>(S::widen(in[i])) & kMagnitude;
    most = maximum_int<1>(most, bits < kInfinity ? bits : 0);
  }
  most = group_maximum(most, 32);
  if ((threadIdx.x & 31) == 0 && most > 0) atomicMax(a.largest, most);
}

// ---- affine quantization ----
template <class Q, class X, bool kQuantizes>
__device__ __forceinline__ void run_linear(const LinearArguments& a) {
  typedef std::conditional_t<kQuantizes, X, Q> In;
  typedef std::conditional_t<kQuantizes, Q, X> Out;
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kLinearElements;
  if (begin >= a.count) return;
  const bool is_whole = a.aligned && begin + kLinearElements <= a.count;
  const int64_t count = a.count - begin < kLinearElements ? a.count - begin : kLinearElements;
  const In* x = static_cast<const In*>(a.x) + begin;
  Out* y = static_cast<Out*>(a.y) + begin;
  Pack<In, kLinearElements> in{};
  if (is_whole) {
    in = *reinterpret_cast<const Pack<In, kLinearElements>*>(x);
  } else {
#pragma unroll
    for (int i = 0; i < kLinearElements; ++i) {
      if (i < count) in.values[i] = x[i];
    }
  }
  Pack<Out, kLinearElements> out;
  LinearQuantizer<Q> quantizer;
  int64_t left = 0;  // of the run of neighbours that share a channel
  int64_t channel = 0;
  if (a.channels > 1) {
    const int64_t run = a.count <= INT32_MAX ? static_cast<uint32_t>(begin) / static_cast<uint32_t>(a.inner)
                                             : begin / a.inner;
    left = a.inner - (begin - run * a.inner);
    channel = a.count <= INT32_MAX ? static_cast<uint32_t>(run) % static_cast<uint32_t>(a.channels)
                                   : run % a.channels;
  } else {
    left = kLinearElements;
  }
  quantizer.scale = to_float(static_cast<const X*>(a.scale)[channel]);
  quantizer.zero_point = static_cast<const Q*>(a.zero_point)[channel];
#pragma unroll
  for (int i = 0; i < kLinearElements; ++i) {
    if (left == 0) {
      channel = channel + 1 < a.channels ? channel + 1 : 0;
      left = a.inner;
      quantizer.scale = to_float(static_cast<const X*>(a.scale)[channel]);
      quantizer.zero_point = static_cast<const Q*>(a.zero_point)[channel];
    }
    --left;
    if constexpr (kQuantizes) {
      quantizer.store(to_float(in.values[i]), &out.values[i]);
    } else {
      from_float(quantizer.load(in.values[i]), &out.values[i]);
    }
  }
  if (is_whole) {
    *reinterpret_cast<Pack<Out, kLinearElements>*>(y) = out;
  } else {
#pragma unroll
    for (int i = 0; i < kLinearElements; ++i) {
      if (i < count) y[i] = out.values[i];
    }
  }
}

}  // namespace gpu
}  // namespace quark

// ---- the kernels; launch.cc composes their names ----
#define QUARK_KERNEL extern "C" __global__ void __launch_bounds__(256)

#define QUARK_BLOCK_KERNEL(walk, storage, Storage, kind, spacing, carry, float_scale, even, pass)                    \
  QUARK_KERNEL quark_##walk##_##storage##_##kind##_##even##pass(const quark::gpu::BlockArguments a) {                \
    quark::gpu::run_##walk<quark::gpu::PolicyOf<quark::gpu::Spacing::spacing, carry, float_scale, even, pass>,       \
                           quark::gpu::Storage>(a);                                                                  \
  }
#define QUARK_WALKS(...)                     \
  QUARK_BLOCK_KERNEL(rows, f32, Float32, __VA_ARGS__)    \
  QUARK_BLOCK_KERNEL(rows, f16, Float16, __VA_ARGS__)    \
  QUARK_BLOCK_KERNEL(columns, f32, Float32, __VA_ARGS__) \
  QUARK_BLOCK_KERNEL(columns, f16, Float16, __VA_ARGS__) \
  QUARK_BLOCK_KERNEL(any, f32, Float32, __VA_ARGS__)     \
  QUARK_BLOCK_KERNEL(any, f16, Float16, __VA_ARGS__)
#define QUARK_ROUNDINGS(...)         \
  QUARK_WALKS(__VA_ARGS__, 0, 0) \
  QUARK_WALKS(__VA_ARGS__, 0, 1) \
  QUARK_WALKS(__VA_ARGS__, 1, 0) \
  QUARK_WALKS(__VA_ARGS__, 1, 1)

QUARK_ROUNDINGS(floats, kFloat, false, false)
QUARK_ROUNDINGS(integers, kUniform, false, false)
QUARK_ROUNDINGS(subblocks, kSubBlocks, false, false)
QUARK_ROUNDINGS(carrying, kUniform, true, false)
QUARK_ROUNDINGS(scaledfloats, kFloat, false, true)
QUARK_ROUNDINGS(scaledintegers, kUniform, false, true)

QUARK_KERNEL quark_largest_f32(const quark::gpu::LargestArguments a) { quark::gpu::run_largest<quark::gpu::Float32>(a); }
QUARK_KERNEL quark_largest_f16(const quark::gpu::LargestArguments a) { quark::gpu::run_largest<quark::gpu::Float16>(a); }

#define QUARK_LINEAR_KERNELS(name, Q)                                                                           \
  QUARK_KERNEL quark_quantize_f32_##name(const quark::gpu::LinearArguments a) {                                 \
    quark::gpu::run_linear<Q, float, true>(a);                                                                  \
  }                                                                                                             \
  QUARK_KERNEL quark_quantize_f16_##name(const quark::gpu::LinearArguments a) {                                 \
    quark::gpu::run_linear<Q, quark::Half, true>(a);                                                            \
  }                                                                                                             \
  QUARK_KERNEL quark_dequantize_f32_##name(const quark::gpu::LinearArguments a) {                               \
    quark::gpu::run_linear<Q, float, false>(a);                                                                 \
  }                                                                                                             \
  QUARK_KERNEL quark_dequantize_f16_##name(const quark::gpu::LinearArguments a) {                               \
    quark::gpu::run_linear<Q, quark::Half, false>(a);                                                           \
  }

QUARK_LINEAR_KERNELS(i8, int8_t)
QUARK_LINEAR_KERNELS(u8, uint8_t)
QUARK_LINEAR_KERNELS(i16, int16_t)
QUARK_LINEAR_KERNELS(u16, uint16_t)
QUARK_LINEAR_KERNELS(i32, int32_t)
QUARK_LINEAR_KERNELS(u32, uint32_t)
QUARK_LINEAR_KERNELS(half, quark::Half)
QUARK_LINEAR_KERNELS(bfloat, quark::BrainFloat)
