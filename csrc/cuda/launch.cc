#include "launch.h"

#include <algorithm>
#include <memory>
#include <string>

#include "arguments.h"
#include "driver.h"

namespace quark {
namespace gpu {
namespace {

constexpr int64_t kMostItems = INT32_MAX - kThreads * kVectorsPerThread;  // that a kernel counts in 32 bits
constexpr int kWarp = 32;
constexpr int64_t kMostLargestBlocks = 2048;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }
int ceil_log2(int64_t value) {
  int bits = 0;
  while (int64_t{1} << bits < value) ++bits;
  return bits;
}
bool is_aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

const char* storage_name(Storage storage) { return storage == Storage::kFloat32 ? "f32" : "f16"; }
int64_t storage_bytes(Storage storage) { return storage == Storage::kFloat32 ? 4 : 2; }

// "quark_rows_f32_floats_10", as the macros at the end of kernels.cu compose it
std::string kernel_name(const char* walk, Storage storage, const BlockParameters& p) {
  const char* kind = is_uniform(p) ? "integers" : "floats";
  if (p.sub_block_size > 0) kind = "subblocks";
  if (p.carry && p.sub_block_size == 0) kind = "carrying";
  if (has_float_scale(p)) kind = is_uniform(p) ? "scaledintegers" : "scaledfloats";
  return std::string("quark_") + walk + "_" + storage_name(storage) + "_" + kind + "_" +
         (p.rounding == Rounding::kHalfEven ? "1" : "0") + (p.nonfinite == NonFinite::kPassthrough ? "1" : "0");
}

}  // namespace

void quantize_dequantize(const void* in, void* out, Storage storage, const Geometry& geometry,
                         const BlockParameters& parameters, void* stream) {
  const int64_t elements = geometry.outer * geometry.n * geometry.inner;
  if (elements == 0) return;
  BlockArguments a{in,
                   out,
                   geometry.outer,
                   geometry.n,
                   geometry.inner,
                   std::min(parameters.block_size, geometry.n),
                   0,
                   0,
                   1,
                   0,
                   0,
                   parameters.sub_block_size,
                   parameters.round_to_bfloat16,
                   parameters.scale_rule == ScaleRule::kMse,
                   nullptr,
                   1.0f,
                   LaneConstants(parameters)};
  if (a.inner == 1 && a.n % a.block_size == 0) {  // then the rows follow each other without a seam
    a.n *= a.outer;
    a.outer = 1;
  }
  a.blocks_in_row = ceil_div(a.n, a.block_size);
  const int64_t blocks = a.outer * a.blocks_in_row * a.inner;
  const int64_t vector = kVectorBytes / storage_bytes(storage);
  const bool is_usual = !a.searches && (a.sub_block_size == 0 || a.sub_block_size == 2);
  const int64_t lanes = a.block_size / vector;  // of a block in whole vectors
  const char* walk = "any";
  int64_t threads = 0;
  if (is_usual && a.inner == 1 && a.block_size % vector == 0 && is_power_of_two(lanes) && lanes <= kWarp &&
      a.n % vector == 0 && is_aligned(in, kVectorBytes) && is_aligned(out, kVectorBytes) &&
      blocks * lanes <= kMostItems) {
    walk = "rows";
    a.lanes = static_cast<int32_t>(lanes);
    a.items = blocks * lanes;
    threads = ceil_div(a.items, kVectorsPerThread);
  } else if (is_usual && a.inner > 1 && a.block_size <= kMostRows && blocks <= kMostItems) {
    walk = "columns";
    a.items = blocks;
    threads = blocks;
  } else {
    a.lanes = a.inner > 1 ? 1 : int32_t{1} << std::min(ceil_log2(a.block_size), ceil_log2(kWarp));
    a.items = blocks;
    a.tree_log2 = std::max(0, ceil_log2(a.block_size) - ceil_log2(a.lanes));
    threads = blocks * a.lanes;
  }
  a.lanes_log2 = ceil_log2(a.lanes);

  std::unique_ptr<DeviceInteger> largest;
  if (has_float_scale(parameters) && parameters.tensor_scale < 0.0f) {
    largest = std::make_unique<DeviceInteger>(stream);
    const LargestArguments arguments{in, elements, largest->pointer()};
    const int64_t pieces = ceil_div(elements, vector * kThreads);
    launch(std::string("quark_largest_") + storage_name(storage), std::min(pieces, kMostLargestBlocks), kThreads,
           &arguments, stream);
    a.largest = largest->pointer();
    a.tensor_scale_divisor = tensor_scale_divisor(parameters);
  }
  launch(kernel_name(walk, storage, parameters), ceil_div(threads, kThreads), kThreads, &a, stream);
}

namespace {

constexpr const char* kQuantizedNames[] = {"i8", "u8", "i16", "u16", "i32", "u32", "half", "bfloat"};
constexpr int64_t kQuantizedBytes[] = {1, 1, 2, 2, 4, 4, 2, 2};

void run_linear(const LinearTensors& tensors, const char* operation, bool quantizes, void* stream) {
  if (tensors.count == 0) return;
  const size_t type = static_cast<size_t>(tensors.type);
  const int64_t floats = storage_bytes(tensors.storage) * kLinearElements;
  const int64_t codes = kQuantizedBytes[type] * kLinearElements;
  const bool aligned = is_aligned(tensors.x, quantizes ? floats : codes) && is_aligned(tensors.y, quantizes ? codes : floats);
  const LinearArguments arguments{tensors.x,     tensors.scale,    tensors.zero_point, tensors.y,
                                  tensors.count, tensors.channels, tensors.inner,      aligned};
  const std::string kernel = std::string("quark_") + operation + "_" + storage_name(tensors.storage) + "_" + kQuantizedNames[type];
  launch(kernel, ceil_div(tensors.count, int64_t{kThreads} * kLinearElements), kThreads, &arguments, stream);
}

}  // namespace

void quantize_linear(const LinearTensors& tensors, void* stream) { run_linear(tensors, "quantize", true, stream); }
void dequantize_linear(const LinearTensors& tensors, void* stream) { run_linear(tensors, "dequantize", false, stream); }

}  // namespace gpu
}  // namespace quark
