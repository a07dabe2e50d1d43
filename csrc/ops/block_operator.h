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
  void compute_on_cuda(const Call& call) const;

 protected:
  static void run(const Call& call, const BlockJob& job);

 private:
  struct Tensors {
    Tensor in;
    Tensor out;
    Storage storage;
    Geometry geometry;
  };
  Tensors read_tensors(const Call& call) const;
  // The tensor's scale that the second input gives, as a number this operator takes.
  float given_tensor_scale(const Call& call) const;
  float find_tensor_scale(const Call& call, const Tensor& x, Storage storage) const;
};

// The operator whose attributes `Description` reads, for tensors of one type.
template <class Description, ort::ElementType kType>
struct BlockOperatorOf : BlockOperator {
  static constexpr const char* kName = Description::kName;
  static constexpr size_t kInputs = Description::kInputs;
  static constexpr size_t kRequiredInputs = 1;
  static constexpr bool kWorksInPlace = true;  // without it, half of the data is not in the caches yet
  static ort::ElementType input_type(size_t index) { return index == 0 ? kType : ort::kFloat; }
  static ort::ElementType output_type() { return kType; }
  // the tensor's scale is looked at before anything runs
  static ort::MemoryType cuda_memory(size_t index) { return index == 0 ? ort::kProviderMemory : ort::kCpuInput; }
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
