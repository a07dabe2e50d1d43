// The kernels compiled for one instruction set; CMakeLists.txt gives this file its compiler flags.
#define QUARK_ISA avx2
#include "lanes.h"
// lanes.h first: the rest is written in its vectors
#include "double_lanes.h"
#include "rounding_lanes.h"
// double_lanes.h second: its sums are what the rest adds up
#include "plane_sums_kernels.h"
// and last what names the kernels
#include "statistics_kernels.h"
