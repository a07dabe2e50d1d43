// Sums of products of rows that Python calls, by the best instruction set of this processor. They run on the thread that
// calls them: the other threads of a pass over samples are busy with the next sample.
#include "row_products.h"

#include <cstring>
#include <new>
#include <vector>

#include "../ort_abi.h"
#include "block_job.h"
#include "denormals.h"

using namespace quark;

namespace {

AddRowProducts choose_kernel() {
#if defined(QUARK_WIDE_KERNELS)
  if (std::strcmp(best_instruction_set(), "avx512") == 0) return avx512::row_products_kernel();
  if (std::strcmp(best_instruction_set(), "avx2") == 0) return avx2::row_products_kernel();
#endif
  return baseline::row_products_kernel();
}

}  // namespace

// 1 if a size is below 0 or an array is missing, 2 if there is too little memory.
extern "C" QUARK_EXPORT int quark_add_products_of_rows(const RowProducts* products) {
  const bool has_sizes = products->rows >= 0 && products->groups >= 0 && products->columns >= 0;
  const bool has_arrays = products->own && products->inner && (products->cross || !products->exact);
  if (!has_sizes || !has_arrays) return 1;
  static const AddRowProducts kernel = choose_kernel();
  try {
    std::vector<float> workspace(static_cast<size_t>(row_products_workspace(*products)));
    const KeepDenormals keep;
    kernel(*products, workspace.data());
  } catch (const std::bad_alloc&) {
    return 2;
  }
  return 0;
}
