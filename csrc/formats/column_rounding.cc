// The rounding of columns that Python calls, by the best instruction set of this processor, on the thread that calls it.
#include "column_rounding.h"

#include <cstring>
#include <new>

#include "../ort_abi.h"
#include "block_job.h"
#include "denormals.h"

using namespace quark;

namespace {

RoundColumns choose_kernel() {
#if defined(QUARK_WIDE_KERNELS)
  if (std::strcmp(best_instruction_set(), "avx512") == 0) return avx512::column_rounding_kernel();
  if (std::strcmp(best_instruction_set(), "avx2") == 0) return avx2::column_rounding_kernel();
#endif
  return baseline::column_rounding_kernel();
}

}  // namespace

// 1 if a size is below 0, an array is missing or the format is beyond the limits, 2 if there is too little memory.
extern "C" QUARK_EXPORT int quark_compensate_columns(const ColumnRounding* r) {
  const bool has_grid = r->block ? are_in_range(*r->block) && !r->before : r->scale && r->zero_point;
  const bool has_all = has_grid && r->factors && r->divisor && r->values && r->result;
  if (r->columns < 0 || r->outputs < 0 || !has_all) return 1;
  static const RoundColumns kernel = choose_kernel();
  const KeepDenormals keep;
  try {
    kernel(*r);
  } catch (const std::bad_alloc&) {
    return 2;
  }
  return 0;
}
