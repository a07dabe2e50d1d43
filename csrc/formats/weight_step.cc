// Iterations of finetuning that Python calls, by the best instruction set of this processor. They run on the thread that
// calls them: a layer's outputs are fitted side by side on threads of the caller, which never wait for each other.
#include "weight_step.h"

#include <cstring>

#include "../ort_abi.h"
#include "block_job.h"
#include "denormals.h"

using namespace quark;

namespace {

WeightStepKernels choose_kernels() {
#if defined(QUARK_WIDE_KERNELS)
  if (std::strcmp(best_instruction_set(), "avx512") == 0) return avx512::weight_step_kernels();
  if (std::strcmp(best_instruction_set(), "avx2") == 0) return avx2::weight_step_kernels();
#endif
  return baseline::weight_step_kernels();
}

const WeightStepKernels& kernels() {
  static const WeightStepKernels chosen = choose_kernels();
  return chosen;
}

}  // namespace

// One step of a layer's weights. 1 if a number or an array that its kind needs is not there.
extern "C" QUARK_EXPORT int quark_weight_step(const WeightStep* step) {
  const bool is_plain = step->kind == StepKind::kPlain;
  const bool is_kind = is_plain || step->kind == StepKind::kAffine || step->kind == StepKind::kAdaRound;
  const bool has_rest = step->weights && step->first && step->second && step->third;
  const bool has_all = step->gradient && step->parameter && step->mean && step->square && (is_plain || has_rest);
  if (!is_kind || step->count < 0 || (step->count > 0 && !has_all)) return 1;
  const KeepDenormals keep;
  kernels().step(*step);
  return 0;
}

// The errors of a batch of outputs, and their sums over the rows. 1 for sizes below 0.
extern "C" QUARK_EXPORT int quark_row_errors(const RowErrors* batch) {
  if (batch->groups < 0 || batch->rows < 0 || batch->outputs < 0) return 1;
  const KeepDenormals keep;
  kernels().errors(*batch);
  return 0;
}
