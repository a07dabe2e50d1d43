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
  float factor;          // of the gradient
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

// The kernel of one instruction set.
typedef void (*RunWeightStep)(const WeightStep& step);

namespace avx512 {
RunWeightStep weight_step_kernel();
}
namespace avx2 {
RunWeightStep weight_step_kernel();
}
namespace baseline {
RunWeightStep weight_step_kernel();
}

}  // namespace quark
