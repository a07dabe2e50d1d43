// ExtendedQuantizeLinear: (x, scale, zero point) -> quantized values of the zero point's type.
#pragma once

#include "linear_operator.h"

namespace quark {

// kFloatType: the type of x and the scale.
template <ort::ElementType kFloatType>
struct ExtendedQuantizeLinear {
  static constexpr const char* kName = "ExtendedQuantizeLinear";
  static constexpr size_t kInputs = 3;
  static constexpr size_t kRequiredInputs = 3;
  static constexpr bool kWorksInPlace = false;
  // the one input of any type gives the output its type
  static ort::ElementType input_type(size_t index) { return index < 2 ? kFloatType : ort::kUndefined; }
  static ort::ElementType output_type() { return ort::kUndefined; }
  static ort::Status* infer(const ort::Api& api, ort::ShapeInferContext* context) {
    return infer_like(api, context, 0, 2);
  }
  explicit ExtendedQuantizeLinear(const Attributes& attributes)
      : axis(attributes.integer("axis", 0, INT64_MIN, INT64_MAX)), node(attributes.node()) {}
  void compute(const Call& call) const;
  void compute_on_cuda(const Call& call) const;
  static ort::MemoryType cuda_memory(size_t) { return ort::kProviderMemory; }

  int64_t axis;
  std::string node;
};

extern template struct ExtendedQuantizeLinear<ort::kFloat>;
extern template struct ExtendedQuantizeLinear<ort::kFloat16>;

}  // namespace quark
