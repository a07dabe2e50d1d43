#include "block_job.h"

#include <cstdlib>
#include <cstring>

#include "denormals.h"

namespace quark {
namespace {

constexpr int64_t kChunkElements = 1 << 14;
constexpr int64_t kTileElements = 1 << 15;           // a block of rows by a tile of columns: fits the second-level cache
constexpr int64_t kStreamBytes = int64_t{24} << 20;  // outputs beyond this are written past the caches
constexpr int64_t kTileAlignment = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t at_least_one(int64_t a) { return a < 1 ? 1 : a; }

void cut_runs(BlockJob& job) {
  Geometry& g = job.geometry;
  const int64_t block = job.parameters.block_size;
  if (g.n % block == 0) {  // then the rows follow each other without a seam
    g.n *= g.outer;
    g.outer = 1;
  }
  job.layout = Layout::kRuns;
  job.blocks_in_row = ceil_div(g.n, block);
  job.blocks_in_chunk = at_least_one(kChunkElements / block);
  job.chunks = ceil_div(g.outer * job.blocks_in_row, job.blocks_in_chunk);
}

void cut_columns(BlockJob& job) {
  const Geometry& g = job.geometry;
  const int64_t rows = job.parameters.block_size < g.n ? job.parameters.block_size : g.n;
  const int64_t wanted = at_least_one(kTileElements / rows / kTileAlignment) * kTileAlignment;
  job.layout = Layout::kColumns;
  job.blocks_in_row = ceil_div(g.n, job.parameters.block_size);
  job.tile = wanted < g.inner ? wanted : g.inner;
  job.tiles = at_least_one(g.inner / job.tile);  // the last tile takes the rest, so that none is narrow
  job.chunks = g.outer * job.blocks_in_row * job.tiles;
}

}  // namespace

BlockJob make_block_job(const void* in, void* out, Storage storage, Geometry geometry,
                        const BlockParameters& parameters, const Preparation* preparation) {
  BlockJob job{};
  job.in = in;
  job.out = out;
  job.storage = storage;
  job.geometry = geometry;
  job.parameters = parameters;
  job.preparation = preparation;
  const int64_t elements = geometry.outer * geometry.n * geometry.inner;
  if (elements == 0) return job;
  // a block longer than the axis is the same as one of its length, and keeps the arithmetic on sizes small
  if (job.parameters.block_size > geometry.n) job.parameters.block_size = geometry.n;
  // what is written in place is in the caches already
  job.streams = !job.is_staged() && in != out && elements * 4 >= kStreamBytes;
  if (geometry.inner == 1 && preparation == nullptr) {
    cut_runs(job);
  } else {
    cut_columns(job);
  }
  return job;
}

namespace {

struct InstructionSet {
  const char* name;
  RunChunks run;
  LargestFinite largest;
  PrepareChunks prepare;
};

#if defined(QUARK_WIDE_KERNELS)
// QUARK_INSTRUCTION_SET names the best one that may be used, so that the others can be tested too.
bool may_use(const char* name) {
  const char* limit = std::getenv("QUARK_INSTRUCTION_SET");
  return limit == nullptr || std::strcmp(limit, name) == 0 || std::strcmp(limit, "avx512") == 0;
}
#endif

InstructionSet choose_instruction_set() {
#if defined(QUARK_WIDE_KERNELS)
  __builtin_cpu_init();
  if (may_use("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return {"avx512", avx512::run_chunks, avx512::largest_finite, avx512::prepare_chunks};
  }
  if (may_use("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return {"avx2", avx2::run_chunks, avx2::largest_finite, avx2::prepare_chunks};
  }
#endif
  return {"baseline", baseline::run_chunks, baseline::largest_finite, baseline::prepare_chunks};
}

const InstructionSet& chosen() {
  static const InstructionSet set = choose_instruction_set();
  return set;
}

// Subnormal numbers are ordinary values here, whatever the caller's thread was told about them.
void run_exactly(const BlockJob& job, int64_t begin, int64_t end) {
  const KeepDenormals keep;
  chosen().run(job, begin, end);
}

}  // namespace

float tensor_scale_of(int32_t largest, const BlockParameters& parameters) {
  const KeepDenormals keep;
  float amax;
  std::memcpy(&amax, &largest, sizeof amax);
  return amax / tensor_scale_divisor(parameters);
}

RunChunks best_run_chunks() { return run_exactly; }
LargestFinite best_largest_finite() { return chosen().largest; }
PrepareChunks best_prepare_chunks() { return chosen().prepare; }
const char* best_instruction_set() { return chosen().name; }

}  // namespace quark
