// MXQuantizeDequantize: OCP microscaling formats.
#pragma once

#include "block_operator.h"

namespace quark {

template <ort::ElementType kType>
struct MXQuantizeDequantize : BlockOperator {
  static constexpr const char* kName = "MXQuantizeDequantize";
  static constexpr size_t kInputs = 1;
  static ort::ElementType input_type(size_t) { return kType; }
  static ort::ElementType output_type() { return kType; }
  static ort::Status* infer(const ort::Api& api, ort::ShapeInferContext* context) {
    return infer_like(api, context, 0, 0);
  }
  explicit MXQuantizeDequantize(const Attributes& attributes) : BlockOperator(read(attributes)) {}
  static BlockOperator read(const Attributes& attributes);
};

extern template struct MXQuantizeDequantize<ort::kFloat>;
extern template struct MXQuantizeDequantize<ort::kFloat16>;

}  // namespace quark
