// BFPQuantizeDequantize: block floating point (to_bfp) and shared microexponents (to_bfp_prime).
#pragma once

#include "block_operator.h"

namespace quark {

struct BFPQuantizeDequantize {
  static constexpr const char* kName = "BFPQuantizeDequantize";
  static constexpr size_t kInputs = 1;
  static BlockOperator read(const Attributes& attributes);
};

}  // namespace quark
