// Iterations of finetuning for the outputs of a layer, or for some of them, as src/quark/features/finetuning/
// compiled_fit.py defines them: outputs of a batch of rows, their errors, the gradient of the weights, and a step.
//
// Matrices have one column for each output, so that neighbours in memory are outputs that are computed alike:
//
//     outputs[g, row, o] = bias[g, o] + sum over k of inputs[g, row, k] * weights[g, k, o]
//
// In a layer with one output for each group, such as a depthwise convolution, those outputs are the columns: there is
// one group, and every column has inputs of its own, inputs[row, k, o].
//
// Every sum runs in an order that depends on the length of a row and the number of rows only, so that the same numbers
// come out however outputs are shared out over threads.
#pragma once

#include <cstdint>

#include "weight_step.h"

namespace quark {

// Python's RowTraining has the same fields.
struct RowTraining {
  int64_t groups;
  int64_t length;   // inputs of an output
  int64_t outputs;  // of a group
  int64_t rows;     // of a batch
  int64_t count;    // of rows: a batch ends there, even if it has fewer
  int64_t batches;  // of an iteration
  int64_t has_own_inputs;  // every column has inputs of its own
  int64_t input_group;     // numbers from the inputs of one group to those of the next
  int64_t input_row;       // from one row to the next
  int64_t input_column;    // from one input of a row to the next
  int64_t target_group;
  int64_t target_row;
  const float* inputs;
  const float* targets;  // before the bounds; null: `inputs` are a Gram matrix
  const float* lowest;   // bounds of each output, or null
  const float* highest;
  const float* bias;        // what is added
  const float* bias_scale;  // how it is rounded before that, or null
  const float* bias_lowest;
  const float* bias_highest;
  const float* origin;  // with a Gram matrix: weights and bias, [groups, length + 1, outputs], that `cross` is about
  const float* cross;
  float* workspace;  // row_training_workspace() numbers
  WeightStep weights;    // these two without gradients, and without what differs between iterations
  WeightStep bias_step;  // of no numbers: the bias stays as it is
};

// What differs from one iteration to the next; Python's RowIteration has the same fields.
struct RowIteration {
  float weight_step_size;
  float bias_step_size;
  float root;
  float exponent;
  float regularization;
};

constexpr int64_t kMostLanes = 16;  // of a vector: columns that are no whole vector go through the workspace

inline int64_t row_training_workspace(const RowTraining& t) {
  const int64_t rows = t.rows > t.length + 1 ? t.rows : t.length + 1;
  const int64_t of_outputs = t.groups * rows * t.outputs;               // outputs, then their errors
  const int64_t of_weights = 2 * t.groups * (t.length + 1) * t.outputs;  // gradient; what weights moved by
  const int64_t of_bias = 2 * t.groups * t.outputs;                     // rounded; gradient
  return of_outputs + of_weights + of_bias + (rows + t.length + 1) * kMostLanes;
}

// The kernels of one instruction set.
struct RowTrainingKernels {
  // `starts` are the first rows of the batches of all iterations.
  void (*train)(const RowTraining& training, const RowIteration* iterations, const int64_t* starts, int64_t count);
  // Adds the squared errors of `count` rows to those of each output.
  void (*errors)(const RowTraining& training, int64_t count, double* squares);
  // Adds the gradient of half the squared error of `count` rows.
  void (*gradient)(const RowTraining& training, int64_t count, float* of_weights, float* of_bias);
  // Adds the Gram matrix of `count` rows, each with a one behind it, to [groups, length + 1, length + 1].
  void (*gram)(const RowTraining& training, int64_t count, float* gram);
};

namespace avx512 {
RowTrainingKernels row_training_kernels();
}
namespace avx2 {
RowTrainingKernels row_training_kernels();
}
namespace baseline {
RowTrainingKernels row_training_kernels();
}

}  // namespace quark
