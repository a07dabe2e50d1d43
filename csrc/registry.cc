#include "registry.h"

#include <atomic>
#include <mutex>
#include <tuple>
#include <vector>

#include "ops/bfp_quantize_dequantize.h"
#include "ops/extended_dequantize_linear.h"
#include "ops/extended_quantize_linear.h"
#include "ops/float_scale_quantize_dequantize.h"
#include "ops/mx_quantize_dequantize.h"

namespace quark {
namespace {

constexpr const char* kDomain = "com.amd.quark";

// Operators of one name take different types, and run in different execution providers.
template <class... Ops>
struct Operators {
  std::tuple<CustomOp<Ops>...> cpu;
#if defined(QUARK_CUDA)
  std::tuple<CustomOp<OnCuda<Ops>>...> cuda;
#endif

  std::vector<const ort::CustomOp*> all() const {
    std::vector<const ort::CustomOp*> pointers;
    std::apply([&](const auto&... op) { (pointers.push_back(&op), ...); }, cpu);
#if defined(QUARK_CUDA)
    std::apply([&](const auto&... op) { (pointers.push_back(&op), ...); }, cuda);
#endif
    return pointers;
  }
};

// One line per operator.
const Operators<
    BlockOperatorOf<MXQuantizeDequantize, ort::kFloat>, BlockOperatorOf<MXQuantizeDequantize, ort::kFloat16>,
    BlockOperatorOf<BFPQuantizeDequantize, ort::kFloat>, BlockOperatorOf<BFPQuantizeDequantize, ort::kFloat16>,
    BlockOperatorOf<FloatScaleQuantizeDequantize, ort::kFloat>,
    BlockOperatorOf<FloatScaleQuantizeDequantize, ort::kFloat16>,
    ExtendedQuantizeLinear<ort::kFloat>, ExtendedQuantizeLinear<ort::kFloat16>,
    ExtendedDequantizeLinear<ort::kFloat>, ExtendedDequantizeLinear<ort::kFloat16>>
    kOperators;

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
    for (const ort::CustomOp* op : kOperators.all()) {
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
