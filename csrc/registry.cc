#include "registry.h"

#include <atomic>
#include <mutex>

#include "ops/bfp_quantize_dequantize.h"
#include "ops/extended_dequantize_linear.h"
#include "ops/extended_quantize_linear.h"
#include "ops/float_scale_quantize_dequantize.h"
#include "ops/mx_quantize_dequantize.h"

namespace quark {
namespace {

constexpr const char* kDomain = "com.amd.quark";

// One line per operator; operators of one name take different types.
const CustomOp<BlockOperatorOf<MXQuantizeDequantize, ort::kFloat>> kMx32;
const CustomOp<BlockOperatorOf<MXQuantizeDequantize, ort::kFloat16>> kMx16;
const CustomOp<BlockOperatorOf<BFPQuantizeDequantize, ort::kFloat>> kBfp32;
const CustomOp<BlockOperatorOf<BFPQuantizeDequantize, ort::kFloat16>> kBfp16;
const CustomOp<BlockOperatorOf<FloatScaleQuantizeDequantize, ort::kFloat>> kFloatScale32;
const CustomOp<BlockOperatorOf<FloatScaleQuantizeDequantize, ort::kFloat16>> kFloatScale16;
const CustomOp<ExtendedQuantizeLinear<ort::kFloat>> kQuantize32;
const CustomOp<ExtendedQuantizeLinear<ort::kFloat16>> kQuantize16;
const CustomOp<ExtendedDequantizeLinear<ort::kFloat>> kDequantize32;
const CustomOp<ExtendedDequantizeLinear<ort::kFloat16>> kDequantize16;
const ort::CustomOp* const kOperators[] = {&kMx32,         &kMx16,         &kBfp32,      &kBfp16,      &kFloatScale32,
                                           &kFloatScale16, &kQuantize32,   &kQuantize16, &kDequantize32, &kDequantize16};

std::atomic<const void* const*> g_table{nullptr};

// Made once for the process: sessions keep a pointer to the domain and do not own it.
ort::Status* operators_domain(const ort::Api& api, ort::CustomOpDomain** domain) {
  static std::mutex mutex;
  static ort::CustomOpDomain* made = nullptr;
  static const void* const* maker = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (made == nullptr || maker != api.table()) {
    ort::CustomOpDomain* fresh = nullptr;
    if (ort::Status* status = api.create_custom_op_domain(kDomain, &fresh)) return status;
    for (const ort::CustomOp* op : kOperators) {
      if (ort::Status* status = api.add_custom_op(fresh, op)) return status;
    }
    made = fresh;
    maker = api.table();
  }
  *domain = made;
  return nullptr;
}

}  // namespace

// Shape inference is called without an interface; it uses that of the latest registration.
ort::Api registered_api() { return ort::Api(g_table.load()); }

ort::Status* register_operators(const ort::Api& api, ort::SessionOptions* options) {
  g_table = api.table();
  ort::CustomOpDomain* domain = nullptr;
  if (ort::Status* status = operators_domain(api, &domain)) return status;
  return api.add_domain(options, domain);
}

}  // namespace quark
