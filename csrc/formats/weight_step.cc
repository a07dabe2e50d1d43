// Iterations of finetuning that Python calls, by the best instruction set of this processor. They run on the thread that
// calls them: a layer's outputs are fitted side by side on threads of the caller, which never wait for each other.
#include "weight_step.h"

#include <cstring>

#include "../ort_abi.h"
#include "block_job.h"
#include "denormals.h"
#include "row_training.h"

using namespace quark;

namespace {

struct Kernels {
  RunWeightStep step;
  RowTrainingKernels rows;
};

Kernels choose_kernels() {
#if defined(QUARK_WIDE_KERNELS)
  if (std::strcmp(best_instruction_set(), "avx512") == 0) {
    return {avx512::weight_step_kernel(), avx512::row_training_kernels()};
  }
  // every processor with AVX2 but one has fused products as well
  if (std::strcmp(best_instruction_set(), "avx2") == 0 && __builtin_cpu_supports("fma")) {
    return {avx2::weight_step_kernel(), avx2::row_training_kernels()};
  }
#endif
  return {baseline::weight_step_kernel(), baseline::row_training_kernels()};
}

const Kernels& kernels() {
  static const Kernels chosen = choose_kernels();
  return chosen;
}

bool has_all(const WeightStep& step, bool has_gradient) {
  const bool is_plain = step.kind == StepKind::kPlain;
  const bool is_kind = is_plain || step.kind == StepKind::kAffine || step.kind == StepKind::kAdaRound;
  const bool has_rest = step.weights && step.first && step.second && step.third;
  const bool has_moments = step.parameter && step.mean && step.square && (step.gradient || !has_gradient);
  return is_kind && step.count >= 0 && (step.count == 0 || (has_moments && (is_plain || has_rest)));
}

bool has_all(const RowTraining& t) {
  const bool has_sizes = t.groups >= 0 && t.length >= 0 && t.outputs >= 0 && t.rows > 0 && t.batches > 0;
  const bool has_rounding = !t.bias_scale || (t.bias_lowest && t.bias_highest);
  const bool has_goal = t.targets || (t.origin && t.cross);
  return has_sizes && has_rounding && has_goal && t.inputs && t.bias && t.workspace && t.weights.weights;
}

}  // namespace

// One step of a layer's weights. 1 if a number or an array that its kind needs is not there.
extern "C" QUARK_EXPORT int quark_weight_step(const WeightStep* step) {
  if (!has_all(*step, true)) return 1;
  const KeepDenormals keep;
  kernels().step(*step);
  return 0;
}

// The numbers of workspace that training needs.
extern "C" QUARK_EXPORT int64_t quark_row_training_workspace(const RowTraining* training) {
  return row_training_workspace(*training);
}

// `count` iterations; `starts` has the first row of each of their batches. 1 if something is missing.
extern "C" QUARK_EXPORT int quark_train_rows(const RowTraining* training, const RowIteration* iterations,
                                             const int64_t* starts, int64_t count) {
  const bool has_steps = has_all(training->weights, false) && has_all(training->bias_step, false);
  if (!has_all(*training) || !has_steps || !iterations || (!starts && training->targets)) return 1;
  const KeepDenormals keep;
  kernels().rows.train(*training, iterations, starts, count);
  return 0;
}

// Adds the gradient of half the squared error of the first `count` rows. 1 if something is missing.
extern "C" QUARK_EXPORT int quark_row_gradient(const RowTraining* training, int64_t count, float* of_weights,
                                               float* of_bias) {
  if (!has_all(*training) || !training->targets || !of_weights || !of_bias) return 1;
  const KeepDenormals keep;
  kernels().rows.gradient(*training, count, of_weights, of_bias);
  return 0;
}

// Adds the Gram matrix of the first `count` rows, each with a one behind it. 1 if something is missing.
extern "C" QUARK_EXPORT int quark_row_gram(const RowTraining* training, int64_t count, float* gram) {
  if (!has_all(*training) || training->has_own_inputs || !gram) return 1;
  const KeepDenormals keep;
  kernels().rows.gram(*training, count, gram);
  return 0;
}

// Adds the squared errors of the first `count` rows to those of each output. 1 if something is missing.
extern "C" QUARK_EXPORT int quark_row_errors(const RowTraining* training, int64_t count, double* squares) {
  if (!has_all(*training) || !training->targets || !squares) return 1;
  const KeepDenormals keep;
  kernels().rows.errors(*training, count, squares);
  return 0;
}
