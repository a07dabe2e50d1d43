// The block operators of domain com.amd.quark.cpu: Q(Pad(Min(x, bounds), pads) - centers) in one pass over memory.
//
// Inputs are x, float32 of rank 4; bounds and centers, one number or one for each channel (axis 1); and pads, as ONNX's
// Pad takes them, with zeros in batch and channels. Attributes are those of the operator of the same name in
// com.amd.quark; blocks lie along the channels.
#pragma once

#include "block_operator.h"

namespace quark {

struct PreparedBlockOperator : BlockOperator {
  explicit PreparedBlockOperator(BlockOperator op) : BlockOperator(std::move(op)) {}
  void compute(const Call& call) const;

 private:
  // The step from one channel's number to the next.
  int64_t step_of(const Tensor& numbers, int64_t channels, const char* name) const;
  // The shape of the output; fills in what the geometry says of the preparation.
  std::vector<int64_t> padded_shape(const Tensor& x, const Tensor& pads, Preparation& preparation) const;
};

template <class Description>
struct PreparedBlockOperatorOf : PreparedBlockOperator {
  static constexpr const char* kName = Description::kName;
  static constexpr size_t kInputs = 4;
  static constexpr size_t kRequiredInputs = 4;
  static constexpr bool kWorksInPlace = true;
  static ort::ElementType input_type(size_t index) { return index < 3 ? ort::kFloat : ort::kInt64; }
  static ort::ElementType output_type() { return ort::kFloat; }
  // pads are not known before the node runs: the file says what shape the output has
  static ort::Status* infer(const ort::Api&, ort::ShapeInferContext*) { return nullptr; }
  explicit PreparedBlockOperatorOf(const Attributes& attributes)
      : PreparedBlockOperator(Description::read(attributes)) {}
};

}  // namespace quark
