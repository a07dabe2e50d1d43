// What the kernels get: filled in by launch.cc, read by kernels.cu.
#pragma once

#include "scalar_lanes.h"
//
#include "../formats/lane_math.h"

namespace quark {
namespace gpu {

// A tensor seen as (outer, n, inner) with blocks along n. Which kernel takes it decides what `lanes` counts.
struct BlockArguments {
  const void* in;
  void* out;
  int64_t outer;
  int64_t n;
  int64_t inner;
  int64_t block_size;
  int64_t blocks_in_row;  // the last of them may be shorter
  int64_t items;          // rows: vectors; else: blocks
  int32_t lanes;          // threads that share a block, a power of two of at most 32
  int32_t lanes_log2;
  int32_t tree_log2;  // any, rule mse: each lane adds up 2^tree_log2 errors
  int32_t sub_block_size;
  int32_t round_to_bfloat16;
  int32_t searches;           // rule mse
  const int32_t* largest;     // bits of the tensor's largest magnitude, if its scale is to be found from that
  float tensor_scale_divisor;
  LaneConstants constants;
};

struct LargestArguments {
  const void* in;
  int64_t count;
  int32_t* largest;  // starts as 0
};

struct LinearArguments {
  const void* x;
  const void* scale;
  const void* zero_point;
  void* y;
  int64_t count;
  int64_t channels;
  int64_t inner;   // neighbours that share a channel
  int32_t aligned;  // x and y allow vectors of kLinearElements
};

constexpr int kThreads = 256;          // of a thread block, for every kernel
constexpr int kVectorBytes = 16;       // rows: what a thread loads at once
constexpr int kVectorsPerThread = 2;   // rows
constexpr int kMostRows = 32;          // columns: of a block, all in registers
constexpr int kLinearElements = 4;     // of a thread

// The scales that rule `mse` tries, as kScaleFactors has them; computed, since a table would have to be in memory.
constexpr int kFactors = sizeof(kScaleFactors) / sizeof(kScaleFactors[0]);
QUARK_INLINE constexpr float scale_factor(int i) {
  return i < 5 ? 0.75f + 0.0625f * i : i < 9 ? 1.0f + 0.125f * (i - 4) : 2.0f;
}
static_assert(kFactors == 10 && scale_factor(0) == kScaleFactors[0] && scale_factor(1) == kScaleFactors[1] &&
                  scale_factor(4) == kScaleFactors[4] && scale_factor(5) == kScaleFactors[5] &&
                  scale_factor(8) == kScaleFactors[8] && scale_factor(9) == kScaleFactors[9],
              "the same factors");

}  // namespace gpu
}  // namespace quark
