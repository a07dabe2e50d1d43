// FloatScaleQuantizeDequantize: blocks whose scale is a small float, times one number for the tensor (NVFP4).
#pragma once

#include "block_operator.h"

namespace quark {

struct FloatScaleQuantizeDequantize {
  static constexpr const char* kName = "FloatScaleQuantizeDequantize";
  static constexpr size_t kInputs = 2;  // the tensor's scale; found from x if it is absent
  static BlockOperator read(const Attributes& attributes);
};

}  // namespace quark
