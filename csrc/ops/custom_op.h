// What every operator of this library has in common: how ONNX Runtime sees it, how it reports errors.
//
// An operator is a class with
//     kName, kInputs, input_type(i), output_type()    its signature; kUndefined takes any type
//     kRequiredInputs                                 the rest of the inputs may be absent
//     infer(api, context)                             its output's type and shape, before anything runs
//     Op(const Attributes&)                           reads and checks the attributes, throws BadNode
//     compute(const Call&) const                      runs, throws BadNode
//     kWorksInPlace                                   on the CPU, the output may take the memory of input 0
//
// For a GPU it also has
//     compute_on_cuda(const Call&) const              the same, on tensors in the device's memory
//     cuda_memory(i)                                  where input i is wanted
// and OnCuda makes another operator of it, of the same name and for another execution provider.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "../ort_abi.h"

namespace quark {

// A mistake of the model's: becomes an error status with this text.
class BadNode : public std::exception {
 public:
  explicit BadNode(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// Turns a status of ONNX Runtime's own into BadNode.
void check(const ort::Api& api, ort::Status* status);

// A node's attributes; an absent one has the default, one of the wrong type or value throws BadNode.
class Attributes {
 public:
  Attributes(const ort::Api& api, const ort::KernelInfo* info, const char* op_name);

  int64_t integer(const char* name, int64_t absent, int64_t lowest, int64_t highest) const;
  // The index of the value in `legal`; `absent` is the index for an absent attribute.
  size_t choice(const char* name, size_t absent, const std::vector<const char*>& legal) const;
  // "MXQuantizeDequantize node 'conv1_in'"
  const std::string& node() const { return node_; }

 private:
  bool is_absent(ort::Status* status, const char* name) const;

  const ort::Api& api_;
  const ort::KernelInfo* info_;
  std::string node_;
};

struct Tensor {
  ort::ElementType type;
  std::vector<int64_t> shape;
  void* data;

  int64_t count() const;
};

// One run of a node.
class Call {
 public:
  Call(const ort::Api& api, ort::KernelContext* context) : api_(api), context_(context) {}

  bool has_input(size_t index) const;
  Tensor input(size_t index) const;
  Tensor output(const std::vector<int64_t>& shape, ort::ElementType type) const;

  // What the device's work is put on, for a node of a GPU.
  void* stream() const;

  // Runs task(0) ... task(count - 1) on ONNX Runtime's own threads.
  template <class Task>
  void parallel(int64_t count, const Task& task) const {
    if (count <= 0) return;
    if (count == 1) return task(0);
    // an exception must not travel through the runtime's threads
    struct State {
      const Task& task;
      std::atomic<bool> out_of_memory{false};
    } state{task};
    const auto run = [](void* pointer, size_t index) {
      State& shared = *static_cast<State*>(pointer);
      try {
        shared.task(static_cast<int64_t>(index));
      } catch (const std::bad_alloc&) {
        shared.out_of_memory = true;
      }
    };
    const size_t tasks = static_cast<size_t>(count);
    // a batch for each task: whoever is free takes the next, and nobody waits for a thread that was held up
    check(api_, api_.parallel_for(context_, run, tasks, tasks, &state));
    if (state.out_of_memory) throw std::bad_alloc();
  }

 private:
  const ort::Api& api_;
  ort::KernelContext* context_;
};

std::string describe(const std::vector<int64_t>& shape);

// The axis counted from the front; ignored for tensors of rank 0 and 1.
size_t normalize_axis(int64_t axis, size_t rank, const std::string& node);

// Tells ONNX Runtime that output 0 has the shape of `shape_input` and the type of `type_input`.
ort::Status* infer_like(const ort::Api& api, ort::ShapeInferContext* context, size_t shape_input, size_t type_input);

template <class Op>
struct Kernel {
  ort::Api api;
  Op op;
};

template <class Work>
ort::Status* guarded(const ort::Api& api, const Work& work) {
  try {
    work();
    return nullptr;
  } catch (const BadNode& error) {
    return api.create_status(ort::kInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return api.create_status(ort::kFail, error.what());
  }
}

ort::Api registered_api();

// An operator as it runs in CUDAExecutionProvider.
template <class Op>
struct OnCuda : Op {
  using Op::Op;
  void compute(const Call& call) const { this->compute_on_cuda(call); }
};

// Where an operator runs, and where its inputs are.
template <class Op>
struct Provider {
  static constexpr const char* kName = nullptr;  // the CPU
  static constexpr bool kWorksInPlace = Op::kWorksInPlace;
  static ort::MemoryType memory(size_t) { return ort::kProviderMemory; }
};
template <class Op>
struct Provider<OnCuda<Op>> {
  static constexpr const char* kName = "CUDAExecutionProvider";
  static constexpr bool kWorksInPlace = false;  // its kernels read and write through separate pointers
  static ort::MemoryType memory(size_t index) { return Op::cuda_memory(index); }
};

template <class Op>
struct CustomOp : ort::CustomOp {
  typedef Op Operator;

  CustomOp() : ort::CustomOp{} {
    version = ort::kApiVersion;
    name = [](const ort::CustomOp*) { return Op::kName; };
    execution_provider = [](const ort::CustomOp*) -> const char* { return Provider<Op>::kName; };
    input_type = [](const ort::CustomOp*, size_t index) { return Op::input_type(index); };
    input_type_count = [](const ort::CustomOp*) { return Op::kInputs; };
    output_type = [](const ort::CustomOp*, size_t) { return Op::output_type(); };
    output_type_count = [](const ort::CustomOp*) -> size_t { return 1; };
    input_characteristic = [](const ort::CustomOp*, size_t index) {
      return index < Op::kRequiredInputs ? ort::kRequired : ort::kOptional;
    };
    output_characteristic = [](const ort::CustomOp*, size_t) { return ort::kRequired; };
    input_memory_type = [](const ort::CustomOp*, size_t index) -> int { return Provider<Op>::memory(index); };
    variadic_input_min_arity = [](const ort::CustomOp*) { return 0; };
    variadic_input_homogeneity = [](const ort::CustomOp*) { return 0; };
    variadic_output_min_arity = [](const ort::CustomOp*) { return 0; };
    variadic_output_homogeneity = [](const ort::CustomOp*) { return 0; };
    create_kernel_v2 = &create;
    compute_v2 = [](void* kernel, ort::KernelContext* context) {
      const auto& self = *static_cast<const Kernel<Op>*>(kernel);
      return guarded(self.api, [&] { self.op.compute(Call(self.api, context)); });
    };
    destroy_kernel = [](void* kernel) { delete static_cast<Kernel<Op>*>(kernel); };
    infer_output_shape = [](const ort::CustomOp*, ort::ShapeInferContext* context) {
      return Op::infer(registered_api(), context);
    };
    start_version = [](const ort::CustomOp*) { return 1; };
    end_version = [](const ort::CustomOp*) { return 1; };
    if (Provider<Op>::kWorksInPlace) {
      may_reuse = [](int** inputs, int** outputs) -> size_t {
        *inputs = new int[1]{0};
        *outputs = new int[1]{0};
        return 1;
      };
      release_may_reuse = [](int* inputs, int* outputs) {
        delete[] inputs;
        delete[] outputs;
      };
    }
  }

  static ort::Status* QUARK_ORT_CALL create(const ort::CustomOp*, const void* const* table,
                                            const ort::KernelInfo* info, void** kernel) {
    const ort::Api api(table);
    return guarded(api, [&] { *kernel = new Kernel<Op>{api, Op(Attributes(api, info, Op::kName))}; });
  }
};

}  // namespace quark
