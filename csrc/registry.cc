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
#include "ops/prepared_block_operator.h"

namespace quark {
namespace {

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

const std::tuple<CustomOp<PreparedBlockOperatorOf<MXQuantizeDequantize>>,
                 CustomOp<PreparedBlockOperatorOf<BFPQuantizeDequantize>>,
                 CustomOp<PreparedBlockOperatorOf<FloatScaleQuantizeDequantize>>>
    kPreparedOperators;

struct Domain {
  const char* name;
  std::vector<const ort::CustomOp*> operators;
};

std::vector<Domain> all_domains() {
  Domain prepared{"com.amd.quark.cpu", {}};
  std::apply([&](const auto&... op) { (prepared.operators.push_back(&op), ...); }, kPreparedOperators);
  return {{"com.amd.quark", kOperators.all()}, prepared};
}

std::atomic<const void* const*> g_table{nullptr};

// Made once for the process: sessions keep pointers to the domains and do not own them.
ort::Status* made_domains(const ort::Api& api, std::vector<ort::CustomOpDomain*>* domains) {
  static std::mutex mutex;
  static std::vector<ort::CustomOpDomain*> made;
  static const void* const* maker = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (made.empty() || maker != api.table()) {
    std::vector<ort::CustomOpDomain*> fresh;
    for (const Domain& domain : all_domains()) {
      fresh.push_back(nullptr);
      if (ort::Status* status = api.create_custom_op_domain(domain.name, &fresh.back())) return status;
      for (const ort::CustomOp* op : domain.operators) {
        if (ort::Status* status = api.add_custom_op(fresh.back(), op)) return status;
      }
    }
    made = fresh;
    maker = api.table();
  }
  *domains = made;
  return nullptr;
}

}  // namespace

// Shape inference is called without an interface; it uses that of the latest registration.
ort::Api registered_api() { return ort::Api(g_table.load()); }

ort::Status* register_operators(const ort::Api& api, ort::SessionOptions* options) {
  g_table = api.table();
  std::vector<ort::CustomOpDomain*> domains;
  if (ort::Status* status = made_domains(api, &domains)) return status;
  for (ort::CustomOpDomain* domain : domains) {
    if (ort::Status* status = api.add_domain(options, domain)) return status;
  }
  return nullptr;
}

}  // namespace quark
