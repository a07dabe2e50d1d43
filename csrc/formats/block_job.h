// One tensor to quantize, cut into chunks that threads may take in any order.
#pragma once

#include <cstdint>

#include "block_parameters.h"

namespace quark {

enum class Storage : int32_t { kFloat32 = 0, kFloat16 = 1 };

// How the chunks are cut. `kRuns`: inner is 1 and chunks are ranges of blocks, one after the other in memory.
// `kColumns`: a chunk is one block of rows and a tile of neighbouring columns.
enum class Layout { kRuns, kColumns };

// What becomes of the planes of a tensor (outer, n, height, width) on the way: no value is above its channel's bound, zeros
// are put around, and the channel's center is subtracted.
struct Preparation {
  const float* bounds;
  const float* centers;
  int64_t bounds_step;  // from one channel to the next: 1, or 0 where all have the same number
  int64_t centers_step;
  int64_t height;  // before zeros are put around
  int64_t width;
  int64_t top;  // rows of zeros above
  int64_t left;
  int64_t padded_width;
};

struct BlockJob {
  const void* in;
  void* out;
  Storage storage;
  Geometry geometry;
  BlockParameters parameters;
  const Preparation* preparation;  // of float32 in columns; null where the input is quantized as it is

  Layout layout;
  int64_t blocks_in_row;  // the last of them may be shorter
  int64_t blocks_in_chunk;  // kRuns
  int64_t tile;             // kColumns: columns in a chunk
  int64_t tiles;            // kColumns: chunks side by side
  int64_t chunks;
  bool streams;  // write past the caches

  // Does the input go through a buffer on its way?
  bool is_staged() const {
    return storage == Storage::kFloat16 || parameters.round_to_bfloat16 != 0 || preparation != nullptr;
  }

  const float* in32() const { return static_cast<const float*>(in); }
  float* out32() const { return static_cast<float*>(out); }
  const uint16_t* in16() const { return static_cast<const uint16_t*>(in); }
  uint16_t* out16() const { return static_cast<uint16_t*>(out); }
};

// Chunks that hold at least one element each; a job of no elements has none. `in` and `out` may be the same memory, and
// must not overlap otherwise. The geometry is that of the output.
BlockJob make_block_job(const void* in, void* out, Storage storage, Geometry geometry,
                        const BlockParameters& parameters, const Preparation* preparation = nullptr);

// The bits of the largest finite magnitude among the elements begin..end; 0 if there is none.
typedef int32_t (*LargestFinite)(const void* in, Storage storage, int64_t begin, int64_t end);

// Writes the chunks begin..end of a prepared tensor to the output, unquantized; the same of these.
typedef int32_t (*PrepareChunks)(const BlockJob& job, int64_t begin, int64_t end);

constexpr int64_t kLargestElements = int64_t{1} << 16;  // that one thread looks through at a time

// The scale of a tensor with that largest magnitude.
float tensor_scale_of(int32_t largest, const BlockParameters& parameters);

typedef void (*RunChunks)(const BlockJob& job, int64_t begin, int64_t end);

// The fastest code that this processor runs; and its name: "avx512", "avx2" or "baseline".
RunChunks best_run_chunks();
LargestFinite best_largest_finite();
PrepareChunks best_prepare_chunks();
const char* best_instruction_set();

namespace avx512 {
void run_chunks(const BlockJob& job, int64_t begin, int64_t end);
int32_t largest_finite(const void* in, Storage storage, int64_t begin, int64_t end);
int32_t prepare_chunks(const BlockJob& job, int64_t begin, int64_t end);
}
namespace avx2 {
void run_chunks(const BlockJob& job, int64_t begin, int64_t end);
int32_t largest_finite(const void* in, Storage storage, int64_t begin, int64_t end);
int32_t prepare_chunks(const BlockJob& job, int64_t begin, int64_t end);
}
namespace baseline {
void run_chunks(const BlockJob& job, int64_t begin, int64_t end);
int32_t largest_finite(const void* in, Storage storage, int64_t begin, int64_t end);
int32_t prepare_chunks(const BlockJob& job, int64_t begin, int64_t end);
}

}  // namespace quark
