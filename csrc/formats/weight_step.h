// One iteration of finetuning for the weights of a layer, as src/quark/features/finetuning/learned_weights.py defines
// it: the gradient of what is learned, Adam, and the weights that the next iteration computes with, in one pass.
#pragma once

#include <cstdint>

namespace quark {

enum class StepKind : int32_t {
  kPlain = 0,     // Adam alone
  kAffine = 1,    // AdaQuant with fixed scales: the gradient goes straight through the rounding, within the range
  kAdaRound = 2,  // AdaRound: a choice between two neighbours
};

// Python's _WeightStep has the same fields. All arrays have `count` numbers.
struct WeightStep {
  StepKind kind;
  float step_size;       // the learning rate over 1 - beta1^iteration
  float root;            // sqrt(1 - beta2^iteration)
  float exponent;        // kAdaRound: beta - 1 of the regularization; below 0: none yet
  float regularization;  // kAdaRound: twice lambda times beta
  int32_t padding;       // to the next multiple of 8 bytes
  int64_t count;
  const float* gradient;  // of `weights`
  float* parameter;       // what is learned
  float* mean;            // Adam's moments
  float* square;
  float* weights;       // written, unless kPlain
  const float* first;   // kAffine: scale; kAdaRound: the lower neighbour
  const float* second;  // kAffine: lowest level; kAdaRound: the distance of the neighbours
  const float* third;   // kAffine: highest level; kAdaRound: the distance over what the output's error is weighed by
};

// The error of a batch of outputs [groups, rows, outputs], in place; Python's _RowErrors has the same fields.
struct RowErrors {
  int64_t groups;
  int64_t rows;
  int64_t outputs;
  int64_t target_stride;  // numbers from one group to the next
  float* values;          // outputs before the activation; then their gradient, but for the factor 2 / rows
  const float* targets;   // behind the activation
  const float* lowest;    // bounds of each output, or null
  const float* highest;
  float* sums;  // of the gradient over the rows, for each output
};

// The kernels of one instruction set.
struct WeightStepKernels {
  void (*step)(const WeightStep& step);
  void (*errors)(const RowErrors& batch);
};

namespace avx512 {
WeightStepKernels weight_step_kernels();
}
namespace avx2 {
WeightStepKernels weight_step_kernels();
}
namespace baseline {
WeightStepKernels weight_step_kernels();
}

}  // namespace quark
