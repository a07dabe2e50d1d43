// MXQuantizeDequantize: OCP microscaling formats.
#pragma once

#include "block_operator.h"

namespace quark {

struct MXQuantizeDequantize {
  static constexpr const char* kName = "MXQuantizeDequantize";
  static BlockOperator read(const Attributes& attributes);
};

}  // namespace quark
