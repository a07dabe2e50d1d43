// The kernels compiled for one instruction set; CMakeLists.txt gives this file its compiler flags.
#define QUARK_ISA baseline
#include "lanes.h"
// lanes.h first: the rest is written in its vectors
#include "rounding_lanes.h"
#include "exponential_lanes.h"
// and last what names the kernels
#include "weight_step_kernels.h"
#include "row_training_kernels.h"
