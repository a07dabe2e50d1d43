// A block format applied to a tensor of float32 or float16, whichever operator's attributes described it.
#pragma once

#include "../formats/block_job.h"
#include "custom_op.h"

namespace quark {

struct BlockOperator {
  BlockParameters parameters;
  int64_t axis;
  std::string node;

  void compute(const Call& call) const;

 private:
  // The tensor's scale: the second input if it is there, else found from x.
  float tensor_scale(const Call& call, const Tensor& x, Storage storage) const;
};

// The operator whose attributes `Description` reads, for tensors of one type.
template <class Description, ort::ElementType kType>
struct BlockOperatorOf : BlockOperator {
  static constexpr const char* kName = Description::kName;
  static constexpr size_t kInputs = Description::kInputs;
  static constexpr size_t kRequiredInputs = 1;
  static ort::ElementType input_type(size_t index) { return index == 0 ? kType : ort::kFloat; }
  static ort::ElementType output_type() { return kType; }
  static ort::Status* infer(const ort::Api& api, ort::ShapeInferContext* context) {
    return infer_like(api, context, 0, 0);
  }
  explicit BlockOperatorOf(const Attributes& attributes) : BlockOperator(Description::read(attributes)) {}
};

// The attributes that block operators have.
void read_element(const Attributes& attributes, const char* absent, BlockParameters& parameters);
ScaleRule read_scale_rule(const Attributes& attributes);
Rounding read_rounding(const Attributes& attributes, Rounding absent = Rounding::kHalfAway);
NonFinite read_nonfinite(const Attributes& attributes, NonFinite absent);

}  // namespace quark
