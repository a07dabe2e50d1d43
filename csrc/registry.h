#pragma once

#include "ort_abi.h"

namespace quark {

// Adds every operator of the library to the session options.
ort::Status* register_operators(const ort::Api& api, ort::SessionOptions* options);

}  // namespace quark
