// The rows that a convolution multiplies its weights with, at the positions that were chosen, as Python's RowGather
// describes them (src/quark/formats/native.py). It runs on the thread that calls it: others take other samples.
#include <cstdint>

#include "../ort_abi.h"

namespace {

constexpr int64_t kPicks = 64;   // rows that are written at a time: they stay in the cache until they are full
constexpr int64_t kPlanes = 16;  // a cache line of a row whose channels are neighbours

}  // namespace

struct RowGather {
  const float* values;     // planes of plane_size numbers
  int64_t planes;
  int64_t plane_size;
  const int64_t* sources;  // [picks, taps]: a number's place in the first plane; below 0: in the padding, which is 0
  const int64_t* places;   // [picks]: the number of the row
  int64_t picks;
  int64_t taps;
  float* rows;
  int64_t row;         // numbers from one row to the next
  int64_t tap_step;    // within a row
  int64_t plane_step;
};

// 1 if a size is below 0 or an array is missing.
extern "C" QUARK_EXPORT int quark_gather_rows(const RowGather* gather) {
  const RowGather& g = *gather;
  if (g.planes < 0 || g.picks < 0 || g.taps < 0 || !g.values || !g.sources || !g.places || !g.rows) return 1;
  for (int64_t first = 0; first < g.picks; first += kPicks) {
    const int64_t last = first + kPicks < g.picks ? first + kPicks : g.picks;
    for (int64_t plane = 0; plane < g.planes; plane += kPlanes) {
      const int64_t planes = g.planes - plane < kPlanes ? g.planes - plane : kPlanes;
      for (int64_t pick = first; pick < last; ++pick) {
        float* const row = g.rows + g.places[pick] * g.row + plane * g.plane_step;
        for (int64_t tap = 0; tap < g.taps; ++tap) {
          const int64_t source = g.sources[pick * g.taps + tap];
          float* const to = row + tap * g.tap_step;
          if (source < 0) {
            for (int64_t c = 0; c < planes; ++c) to[c * g.plane_step] = 0.0f;
            continue;
          }
          const float* const from = g.values + source + plane * g.plane_size;
          for (int64_t c = 0; c < planes; ++c) to[c * g.plane_step] = from[c * g.plane_size];
        }
      }
    }
  }
  return 0;
}
