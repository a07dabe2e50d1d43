// A block format applied to a tensor of float32 or float16, whichever operator's attributes described it.
#pragma once

#include "../formats/block_parameters.h"
#include "custom_op.h"

namespace quark {

struct BlockOperator {
  BlockParameters parameters;
  int64_t axis;
  std::string node;

  void compute(const Call& call) const;
};

// The attributes that both block operators have.
ScaleRule read_scale_rule(const Attributes& attributes);
Rounding read_rounding(const Attributes& attributes);
NonFinite read_nonfinite(const Attributes& attributes, NonFinite absent);

}  // namespace quark
