// The kernels compiled for one instruction set; CMakeLists.txt gives this file its compiler flags.
#define QUARK_ISA avx2
#include "lanes.h"
// lanes.h first, and last what names the kernels
#include "column_rounding_kernels.h"
