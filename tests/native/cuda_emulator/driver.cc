// A driver whose device is the processor. Built as libcuda.so.1, it takes the place of NVIDIA's, so that everything up
// to the launch of a kernel runs as it does with a GPU; the kernels are kernels.cu, compiled by the C++ compiler.
//
// A device's own NaN has other bits than the processor's; everything else is the same arithmetic.
#include "emulator.h"

#include <dlfcn.h>
#include <ucontext.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "../../../csrc/cuda/kernels.cu"

thread_local Dim threadIdx, blockIdx, gridDim;

namespace {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 1 << 16;

struct Warp {
  ucontext_t scheduler;
  ucontext_t lanes[kLanes];
  std::vector<char> stacks = std::vector<char>(kLanes * kStackBytes);
  uint64_t given[2][kLanes];
  int meetings[kLanes];
  bool finished[kLanes];
  int lane = 0;
};
thread_local Warp g_warp;
thread_local void (*g_run)(const void* kernel, const void* argument);
thread_local const void* g_kernel;
thread_local const void* g_argument;

// A kernel works in the context that it was loaded in, as with devices.
struct Module {
  std::string kernel;
  uintptr_t context;
};
thread_local uintptr_t g_context = 1;
std::atomic<int> g_loaded{0};

void run_lane() {
  g_run(g_kernel, g_argument);
  g_warp.finished[g_warp.lane] = true;
}

template <class Arguments>
void call(const void* kernel, const void* argument) {
  reinterpret_cast<void (*)(Arguments)>(const_cast<void*>(kernel))(*static_cast<const Arguments*>(argument));
}

void run_warp(unsigned first) {
  for (int lane = 0; lane < kLanes; ++lane) {
    getcontext(&g_warp.lanes[lane]);
    g_warp.lanes[lane].uc_stack.ss_sp = g_warp.stacks.data() + lane * kStackBytes;
    g_warp.lanes[lane].uc_stack.ss_size = kStackBytes;
    g_warp.lanes[lane].uc_link = &g_warp.scheduler;
    g_warp.meetings[lane] = 0;
    g_warp.finished[lane] = false;
    makecontext(&g_warp.lanes[lane], run_lane, 0);
  }
  for (bool is_running = true; is_running;) {
    is_running = false;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (g_warp.finished[lane]) continue;
      g_warp.lane = lane;
      threadIdx.x = first + lane;
      swapcontext(&g_warp.scheduler, &g_warp.lanes[lane]);
      is_running = is_running || !g_warp.finished[lane];
    }
  }
}

}  // namespace

uint64_t exchange(uint64_t value, int distance) {
  const int lane = g_warp.lane;
  const int turn = g_warp.meetings[lane]++ & 1;
  g_warp.given[turn][lane] = value;
  swapcontext(&g_warp.lanes[lane], &g_warp.scheduler);
  // every lane meets at the same places, or this would be a deadlock on a device
  if (g_warp.meetings[lane ^ distance] < g_warp.meetings[lane]) abort();
  return g_warp.given[turn][lane ^ distance];
}

#define ENTRY extern "C" __attribute__((visibility("default"))) int

ENTRY cuInit(unsigned) { return 0; }
ENTRY cuGetErrorString(int, const char** text) {
  *text = "emulated";
  return 0;
}
ENTRY cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(g_context);
  return 0;
}
ENTRY cuModuleLoadData(void** module, const void* image) {
  // the name of the only kernel in it
  const std::string text(static_cast<const char*>(image));
  const std::string entry = ".visible .entry ";
  const size_t begin = text.find(entry);
  if (begin == std::string::npos || text.find(entry, begin + 1) != std::string::npos) return 218;
  const std::string kernel = text.substr(begin + entry.size(), text.find('(', begin) - begin - entry.size());
  *module = new Module{kernel, g_context};
  ++g_loaded;
  return 0;
}
ENTRY cuModuleGetFunction(void** function, void* module, const char* name) {
  if (static_cast<Module*>(module)->kernel != name) return 500;
  Dl_info own;
  dladdr(reinterpret_cast<void*>(&cuInit), &own);
  if (dlsym(dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD), name) == nullptr) return 500;
  *function = module;
  return 0;
}
ENTRY cuLaunchKernel(void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                     void*, void** arguments, void**) {
  const std::string& name = static_cast<Module*>(function)->kernel;
  if (static_cast<Module*>(function)->context != g_context) return 400;
  Dl_info own;
  dladdr(reinterpret_cast<void*>(&cuInit), &own);
  g_kernel = dlsym(dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD), name.c_str());
  g_argument = arguments[0];
  g_run = call<quark::gpu::BlockArguments>;
  if (name.find("largest") != std::string::npos) g_run = call<quark::gpu::LargestArguments>;
  if (name.find("quantize") != std::string::npos) g_run = call<quark::gpu::LinearArguments>;
  const bool meets = name.find("_columns_") == std::string::npos && name.find("quantize") == std::string::npos;
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    for (unsigned first = 0; first < block; first += kLanes) {
      if (meets) {
        run_warp(first);
        continue;
      }
      for (threadIdx.x = first; threadIdx.x < first + kLanes; ++threadIdx.x) g_run(g_kernel, g_argument);
    }
  }
  return 0;
}

// For tests: the calling thread's device, counted from 1, and how many kernels were loaded.
ENTRY emulator_use_context(int context) {
  g_context = context;
  return 0;
}
ENTRY emulator_loaded() { return g_loaded; }

ENTRY cuMemAllocAsync(uint64_t* address, size_t bytes, void*) {
  *address = reinterpret_cast<uint64_t>(malloc(bytes));
  return 0;
}
ENTRY cuMemFreeAsync(uint64_t address, void*) {
  free(reinterpret_cast<void*>(address));
  return 0;
}
ENTRY cuMemsetD32Async(uint64_t address, unsigned value, size_t count, void*) {
  for (size_t i = 0; i < count; ++i) reinterpret_cast<unsigned*>(address)[i] = value;
  return 0;
}
