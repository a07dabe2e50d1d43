// The quantizers to train through that Python calls, by the best instruction set of this processor.
//
// An array is seen as (outer, channels, inner), contiguous, and cut into pieces that lie within one channel. Each piece
// has a sum of its own, and these are added up in their order: the gradients do not depend on the number of threads.
#include "fake_quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "../ort_abi.h"
#include "../threads.h"
#include "block_job.h"
#include "denormals.h"

using namespace quark;

namespace {

constexpr int64_t kPieceElements = int64_t{1} << 14;
constexpr int64_t kWorkerElements = int64_t{1} << 15;  // fewer are not worth waking a thread for
constexpr float kMaxStepExponent = 126;                // up to there a power of two and its inverse are normal numbers

FakeQuantizeKernels choose_kernels() {
#if defined(QUARK_WIDE_KERNELS)
  if (std::strcmp(best_instruction_set(), "avx512") == 0) return avx512::fake_quantize_kernels();
  if (std::strcmp(best_instruction_set(), "avx2") == 0) return avx2::fake_quantize_kernels();
#endif
  return baseline::fake_quantize_kernels();
}

const FakeQuantizeKernels& kernels() {
  static const FakeQuantizeKernels chosen = choose_kernels();
  return chosen;
}

// The inverse of a power of two, where both are normal numbers; else 0.
float exact_inverse(float step) {
  int exponent = 0;
  const bool is_power = std::frexp(step, &exponent) == 0.5f;
  return is_power && std::abs(exponent - 1) <= kMaxStepExponent ? std::ldexp(1.0f, 1 - exponent) : 0.0f;
}

FakeStep step_of(const FakeQuantizer& q, int64_t channel) {
  float step = q.parameter[channel];
  if (q.kind == FakeKind::kStep) {
    step = step < std::numeric_limits<float>::min() ? std::numeric_limits<float>::min() : step;
  } else if (q.kind == FakeKind::kThreshold) {
    const float exponent = std::ceil(step) - static_cast<float>(q.step_shift);
    const float confined = std::fmin(std::fmax(exponent, -kMaxStepExponent), kMaxStepExponent);
    step = std::isnan(step) ? step : std::ldexp(1.0f, static_cast<int>(confined));
  }
  const float zero_point = q.zero_point == nullptr ? 0.0f : q.zero_point[channel];
  return {step, exact_inverse(step), q.lowest - zero_point, q.highest - zero_point};
}

struct Pieces {
  int64_t channels;
  int64_t inner;
  int64_t in_run;  // pieces of one run of `inner` elements
  int64_t count;

  Pieces(int64_t outer, int64_t channel_count, int64_t inner_count)
      : channels(channel_count),
        inner(inner_count),
        in_run((inner + kPieceElements - 1) / kPieceElements),
        count(outer * channels * in_run) {}

  int64_t channel(int64_t piece) const { return piece / in_run % channels; }
  int64_t start(int64_t piece) const { return piece / in_run * inner + piece % in_run * kPieceElements; }
  int64_t length(int64_t piece) const {
    const int64_t rest = inner - piece % in_run * kPieceElements;
    return rest < kPieceElements ? rest : kPieceElements;
  }
};

// Calls work(piece, step) for every piece.
template <class Work>
void for_each_piece(const Pieces& pieces, const FakeQuantizer& quantizer, int32_t threads, const Work& work) {
  const int64_t elements = pieces.count / pieces.in_run * pieces.inner;
  const int64_t useful = std::min(pieces.count, elements / kWorkerElements);
  const int64_t workers = std::clamp<int64_t>(useful, 1, threads < 1 ? 1 : threads);
  run_in_parallel(workers, [&](int64_t worker) {
    const KeepDenormals keep;
    FakeStep step{};
    int64_t channel = -1;
    const int64_t end = pieces.count * (worker + 1) / workers;
    for (int64_t piece = pieces.count * worker / workers; piece < end; ++piece) {
      if (channel != pieces.channel(piece)) step = step_of(quantizer, channel = pieces.channel(piece));
      work(piece, step);
    }
  });
}

double slope_factor(const FakeQuantizer& quantizer, int64_t channel) {
  if (quantizer.kind == FakeKind::kStep) return quantizer.slope_factor;
  return step_of(quantizer, channel).step * 0.69314718055994530942;  // ln 2
}

bool is_valid(const FakeQuantizer& q, int64_t outer, int64_t channels, int64_t inner) {
  const bool is_kind = q.kind == FakeKind::kAffine || q.kind == FakeKind::kStep || q.kind == FakeKind::kThreshold;
  return is_kind && q.parameter != nullptr && outer >= 0 && channels >= 0 && inner >= 0;
}

}  // namespace

// The values of x. 1 for numbers out of range. `x` and `out` may be the same.
extern "C" QUARK_EXPORT int quark_fake_quantize(const float* x, float* out, int64_t outer, int64_t channels,
                                                int64_t inner, const FakeQuantizer* quantizer, int32_t threads) {
  if (!is_valid(*quantizer, outer, channels, inner)) return 1;
  if (outer == 0 || channels == 0 || inner == 0) return 0;
  const Pieces pieces(outer, channels, inner);
  for_each_piece(pieces, *quantizer, threads, [&](int64_t piece, const FakeStep& step) {
    const int64_t start = pieces.start(piece);
    kernels().values(quantizer->kind, x + start, out + start, pieces.length(piece), step);
  });
  return 0;
}

// From the gradient of the values that of x, and, unless it is kAffine, that of each channel's parameter. 1 for numbers
// out of range, 2 for want of memory.
extern "C" QUARK_EXPORT int quark_fake_quantize_gradients(const float* x, const float* gradient, float* x_gradient,
                                                          float* parameter_gradient, int64_t outer, int64_t channels,
                                                          int64_t inner, const FakeQuantizer* quantizer,
                                                          int32_t threads) {
  if (!is_valid(*quantizer, outer, channels, inner)) return 1;
  const bool is_learned = quantizer->kind != FakeKind::kAffine;
  const Pieces pieces(outer, channels, inner < 1 ? 1 : inner);
  const bool is_empty = outer == 0 || channels == 0 || inner == 0;
  const size_t count = is_empty ? 0 : static_cast<size_t>(pieces.count);
  const std::unique_ptr<double[]> sums(new (std::nothrow) double[count + static_cast<size_t>(channels)]);
  if (sums == nullptr) return 2;
  double* const totals = sums.get() + count;
  std::memset(totals, 0, static_cast<size_t>(channels) * sizeof(double));
  if (!is_empty) {
    for_each_piece(pieces, *quantizer, threads, [&](int64_t piece, const FakeStep& step) {
      const int64_t start = pieces.start(piece);
      sums[static_cast<size_t>(piece)] = kernels().gradients(quantizer->kind, x + start, gradient + start,
                                                             x_gradient + start, pieces.length(piece), step);
    });
  }
  if (!is_learned) return 0;
  for (size_t piece = 0; piece < count; ++piece) totals[pieces.channel(static_cast<int64_t>(piece))] += sums[piece];
  for (int64_t c = 0; c < channels; ++c) {
    parameter_gradient[c] = static_cast<float>(totals[c] * slope_factor(*quantizer, c));
  }
  return 0;
}
