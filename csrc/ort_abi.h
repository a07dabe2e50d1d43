// The few entries of ONNX Runtime's stable C interface that this library calls, declared here because the runtime's
// wheels ship no headers. The table only ever grows at its end, so an index, once published, keeps its meaning.
// Version 18 of the interface has everything used here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define QUARK_ORT_CALL __stdcall
#define QUARK_EXPORT __declspec(dllexport)
#else
#define QUARK_ORT_CALL
#define QUARK_EXPORT __attribute__((visibility("default")))
#endif

namespace quark {
namespace ort {

constexpr uint32_t kApiVersion = 18;

struct Status;
struct Value;
struct KernelInfo;
struct KernelContext;
struct ShapeInferContext;
struct TypeAndShape;
struct CustomOpDomain;
struct SessionOptions;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2, kNotImplemented = 9, kInvalidGraph = 10 };

enum ElementType : int {
  kUndefined = 0,
  kFloat = 1,
  kUInt8 = 2,
  kInt8 = 3,
  kUInt16 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kUInt32 = 12,
  kBFloat16 = 16,
};

enum MemoryType : int { kCpuInput = -2, kProviderMemory = 0 };

enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };

struct ApiBase {
  const void* const*(QUARK_ORT_CALL* get_api)(uint32_t version);
  const char*(QUARK_ORT_CALL* get_version_string)();
};

// The interface, entered by index.
class Api {
 public:
  explicit Api(const void* const* table) : table_(table) {}
  const void* const* table() const { return table_; }

  Status* create_status(ErrorCode code, const char* message) const {
    return call<0, Status*, int, const char*>(code, message);
  }
  const char* error_message(const Status* status) const { return call<2, const char*, const Status*>(status); }
  Status* create_custom_op_domain(const char* name, CustomOpDomain** domain) const {
    return call<26, Status*, const char*, CustomOpDomain**>(name, domain);
  }
  Status* add_custom_op(CustomOpDomain* domain, const void* op) const {
    return call<27, Status*, CustomOpDomain*, const void*>(domain, op);
  }
  Status* add_domain(SessionOptions* options, CustomOpDomain* domain) const {
    return call<28, Status*, SessionOptions*, CustomOpDomain*>(options, domain);
  }
  Status* tensor_data(Value* value, void** data) const { return call<51, Status*, Value*, void**>(value, data); }
  Status* create_type_and_shape(TypeAndShape** info) const { return call<57, Status*, TypeAndShape**>(info); }
  Status* set_element_type(TypeAndShape* info, ElementType type) const {
    return call<58, Status*, TypeAndShape*, int>(info, type);
  }
  Status* set_dimensions(TypeAndShape* info, const int64_t* dims, size_t count) const {
    return call<59, Status*, TypeAndShape*, const int64_t*, size_t>(info, dims, count);
  }
  Status* element_type(const TypeAndShape* info, ElementType* type) const {
    int value = 0;
    Status* status = call<60, Status*, const TypeAndShape*, int*>(info, &value);
    *type = static_cast<ElementType>(value);
    return status;
  }
  Status* dimension_count(const TypeAndShape* info, size_t* count) const {
    return call<61, Status*, const TypeAndShape*, size_t*>(info, count);
  }
  Status* dimensions(const TypeAndShape* info, int64_t* dims, size_t count) const {
    return call<62, Status*, const TypeAndShape*, int64_t*, size_t>(info, dims, count);
  }
  // The names belong to the info; "" is a dimension without one.
  Status* dimension_names(const TypeAndShape* info, const char** names, size_t count) const {
    return call<63, Status*, const TypeAndShape*, const char**, size_t>(info, names, count);
  }
  Status* tensor_type_and_shape(const Value* value, TypeAndShape** info) const {
    return call<65, Status*, const Value*, TypeAndShape**>(value, info);
  }
  Status* attribute_int(const KernelInfo* info, const char* name, int64_t* value) const {
    return call<86, Status*, const KernelInfo*, const char*, int64_t*>(info, name, value);
  }
  Status* attribute_string(const KernelInfo* info, const char* name, char* value, size_t* size) const {
    return call<87, Status*, const KernelInfo*, const char*, char*, size_t*>(info, name, value, size);
  }
  Status* input_count(const KernelContext* context, size_t* count) const {
    return call<88, Status*, const KernelContext*, size_t*>(context, count);
  }
  Status* input(const KernelContext* context, size_t index, const Value** value) const {
    return call<90, Status*, const KernelContext*, size_t, const Value**>(context, index, value);
  }
  Status* output(KernelContext* context, size_t index, const int64_t* dims, size_t count, Value** value) const {
    return call<91, Status*, KernelContext*, size_t, const int64_t*, size_t, Value**>(context, index, dims, count,
                                                                                     value);
  }
  void release_status(Status* status) const { call<93, void, Status*>(status); }
  void release_type_and_shape(TypeAndShape* info) const { call<99, void, TypeAndShape*>(info); }
  // The stream of the node's execution provider; null for one without.
  Status* gpu_stream(const KernelContext* context, void** stream) const {
    return call<193, Status*, const KernelContext*, void**>(context, stream);
  }
  Status* node_name(const KernelInfo* info, char* name, size_t* size) const {
    return call<244, Status*, const KernelInfo*, char*, size_t*>(info, name, size);
  }
  // The result belongs to the context.
  Status* inferred_input(const ShapeInferContext* context, size_t index, TypeAndShape** info) const {
    return call<268, Status*, const ShapeInferContext*, size_t, TypeAndShape**>(context, index, info);
  }
  Status* infer_output(const ShapeInferContext* context, size_t index, const TypeAndShape* info) const {
    return call<270, Status*, const ShapeInferContext*, size_t, const TypeAndShape*>(context, index, info);
  }
  typedef void (*Task)(void* state, size_t index);
  Status* parallel_for(const KernelContext* context, Task task, size_t total, size_t batches, void* state) const {
    return call<274, Status*, const KernelContext*, Task, size_t, size_t, void*>(context, task, total, batches, state);
  }

 private:
  template <int kIndex, class Result, class... Args>
  Result call(Args... args) const {
    typedef Result(QUARK_ORT_CALL * Entry)(Args...);
    return reinterpret_cast<Entry>(const_cast<void*>(table_[kIndex]))(args...);
  }

  const void* const* table_;
};

// An operator as ONNX Runtime reads it: the order of the members is its interface.
struct CustomOp {
  uint32_t version;
  void*(QUARK_ORT_CALL* create_kernel)(const CustomOp*, const void* const*, const KernelInfo*);
  const char*(QUARK_ORT_CALL* name)(const CustomOp*);
  const char*(QUARK_ORT_CALL* execution_provider)(const CustomOp*);
  ElementType(QUARK_ORT_CALL* input_type)(const CustomOp*, size_t);
  size_t(QUARK_ORT_CALL* input_type_count)(const CustomOp*);
  ElementType(QUARK_ORT_CALL* output_type)(const CustomOp*, size_t);
  size_t(QUARK_ORT_CALL* output_type_count)(const CustomOp*);
  void(QUARK_ORT_CALL* compute)(void*, KernelContext*);
  void(QUARK_ORT_CALL* destroy_kernel)(void*);
  Characteristic(QUARK_ORT_CALL* input_characteristic)(const CustomOp*, size_t);
  Characteristic(QUARK_ORT_CALL* output_characteristic)(const CustomOp*, size_t);
  int(QUARK_ORT_CALL* input_memory_type)(const CustomOp*, size_t);
  int(QUARK_ORT_CALL* variadic_input_min_arity)(const CustomOp*);
  int(QUARK_ORT_CALL* variadic_input_homogeneity)(const CustomOp*);
  int(QUARK_ORT_CALL* variadic_output_min_arity)(const CustomOp*);
  int(QUARK_ORT_CALL* variadic_output_homogeneity)(const CustomOp*);
  Status*(QUARK_ORT_CALL* create_kernel_v2)(const CustomOp*, const void* const*, const KernelInfo*, void**);
  Status*(QUARK_ORT_CALL* compute_v2)(void*, KernelContext*);
  Status*(QUARK_ORT_CALL* infer_output_shape)(const CustomOp*, ShapeInferContext*);
  int(QUARK_ORT_CALL* start_version)(const CustomOp*);
  int(QUARK_ORT_CALL* end_version)(const CustomOp*);
  // Pairs of an input and the output that may take over its memory; how many there are.
  size_t(QUARK_ORT_CALL* may_reuse)(int** inputs, int** outputs);
  void(QUARK_ORT_CALL* release_may_reuse)(int* inputs, int* outputs);
  size_t(QUARK_ORT_CALL* aliases)(int** inputs, int** outputs);
  void(QUARK_ORT_CALL* release_aliases)(int* inputs, int* outputs);
};

}  // namespace ort
}  // namespace quark
