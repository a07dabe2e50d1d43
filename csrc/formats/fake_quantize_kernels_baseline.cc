// The kernels compiled for one instruction set; CMakeLists.txt gives this file its compiler flags.
#define QUARK_ISA baseline
#include "lanes.h"
// lanes.h first: the rest is written in its vectors
#include "double_lanes.h"
#include "rounding_lanes.h"
// and last what names the kernels
#include "fake_quantize_kernels.h"
