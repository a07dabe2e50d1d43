// MXQuantizeDequantize: OCP microscaling formats.
#pragma once

#include "block_operator.h"

namespace quark {

struct MXQuantizeDequantize {
  static constexpr const char* kName = "MXQuantizeDequantize";
  static constexpr size_t kInputs = 1;
  static BlockOperator read(const Attributes& attributes);
};

}  // namespace quark
