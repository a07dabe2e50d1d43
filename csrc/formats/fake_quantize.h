// Quantizers that a network is trained through, as src/quark/ops/fake_quantize.py defines them: values, and gradients of
// the values and of what is learned, in one pass each.
#pragma once

#include <cstdint>

namespace quark {

enum class FakeKind : int32_t {
  kAffine = 0,     // a fixed scale and zero point
  kStep = 1,       // LSQ: a learned step
  kThreshold = 2,  // TQT: a power-of-two step that follows a learned threshold
};

// Python's _FakeQuantizer has the same fields.
struct FakeQuantizer {
  FakeKind kind;
  int32_t step_shift;       // kThreshold: the step is 2^(ceil(parameter) - step_shift)
  float lowest;             // codes
  float highest;
  double slope_factor;      // kStep: what the gradient of the step is multiplied by
  const float* parameter;   // for each channel the scale, the step or log2 of the threshold
  const float* zero_point;  // kAffine: for each channel; null elsewhere
};

// What one channel is rounded with.
struct FakeStep {
  float step;
  float inverse;  // exact, where the step is a power of two; else 0, and x is divided
  float lowest;   // levels: codes less the zero point
  float highest;
};

// The kernels of one instruction set.
struct FakeQuantizeKernels {
  void (*values)(FakeKind kind, const float* x, float* out, int64_t n, const FakeStep& step);
  // Into `out` the gradient of x. Gives the sum of the gradient times the slope of the values in the step, in steps.
  double (*gradients)(FakeKind kind, const float* x, const float* gradient, float* out, int64_t n,
                      const FakeStep& step);
};

namespace avx512 {
FakeQuantizeKernels fake_quantize_kernels();
}
namespace avx2 {
FakeQuantizeKernels fake_quantize_kernels();
}
namespace baseline {
FakeQuantizeKernels fake_quantize_kernels();
}

}  // namespace quark
