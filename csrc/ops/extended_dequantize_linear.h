// ExtendedDequantizeLinear: (quantized values, scale, zero point) -> float values of the scale's type.
#pragma once

#include "linear_operator.h"

namespace quark {

// kFloatType: the type of the scale and the output.
template <ort::ElementType kFloatType>
struct ExtendedDequantizeLinear {
  static constexpr const char* kName = "ExtendedDequantizeLinear";
  static constexpr size_t kInputs = 3;
  static constexpr size_t kRequiredInputs = 3;
  static constexpr bool kWorksInPlace = false;
  static ort::ElementType input_type(size_t index) { return index == 1 ? kFloatType : ort::kUndefined; }
  static ort::ElementType output_type() { return kFloatType; }
  static ort::Status* infer(const ort::Api& api, ort::ShapeInferContext* context) {
    return infer_like(api, context, 0, 1);
  }
  explicit ExtendedDequantizeLinear(const Attributes& attributes)
      : axis(attributes.integer("axis", 0, INT64_MIN, INT64_MAX)), node(attributes.node()) {}
  void compute(const Call& call) const;
  void compute_on_cuda(const Call& call) const;
  static ort::MemoryType cuda_memory(size_t) { return ort::kProviderMemory; }

  int64_t axis;
  std::string node;
};

extern template struct ExtendedDequantizeLinear<ort::kFloat>;
extern template struct ExtendedDequantizeLinear<ort::kFloat16>;

}  // namespace quark
