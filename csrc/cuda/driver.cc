#include "driver.h"

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif
#if defined(__linux__) && defined(__GLIBC__) && defined(__x86_64__)
// glibc 2.34 moved them from libdl to libc under a new version; under the old one every glibc has them
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#endif

// The text of the kernels: csrc/cuda/kernels.ptx.tar.xz, unpacked by CMake.
#if defined(_WIN32)
#define QUARK_READ_ONLY ".section .rdata,\"dr\"\n"
#else
#define QUARK_READ_ONLY ".section .rodata,\"a\"\n"
#endif
__asm__(QUARK_READ_ONLY
        "quark_ptx_begin:\n"
        ".incbin \"" QUARK_PTX_FILE "\"\n"
        "quark_ptx_end:\n"
        ".byte 0\n"
        ".text\n");
extern "C" const char quark_ptx_begin[];
extern "C" const char quark_ptx_end[];

namespace quark {
namespace gpu {
namespace {

#if defined(_WIN32)
#define QUARK_CUDA_CALL __stdcall
#else
#define QUARK_CUDA_CALL
#endif

// The entries that are used, as cuda.h has them. Handles are pointers; 0 is success.
struct Driver {
  int(QUARK_CUDA_CALL* cuInit)(unsigned flags);
  int(QUARK_CUDA_CALL* cuGetErrorString)(int error, const char** text);
  int(QUARK_CUDA_CALL* cuCtxGetCurrent)(void** context);
  int(QUARK_CUDA_CALL* cuModuleLoadData)(void** module, const void* image);
  int(QUARK_CUDA_CALL* cuModuleGetFunction)(void** function, void* module, const char* name);
  int(QUARK_CUDA_CALL* cuLaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                       void* stream, void** arguments, void** extra);
  int(QUARK_CUDA_CALL* cuMemAllocAsync)(uint64_t* address, size_t bytes, void* stream);
  int(QUARK_CUDA_CALL* cuMemFreeAsync)(uint64_t address, void* stream);
  int(QUARK_CUDA_CALL* cuMemsetD32Async)(uint64_t address, unsigned value, size_t count, void* stream);
  int(QUARK_CUDA_CALL* cuCtxGetId)(void* context, unsigned long long* id);  // null before CUDA 12
  std::string problem;
};

#if defined(_WIN32)
constexpr const char* kDriverFile = "nvcuda.dll";
void* open_driver() { return reinterpret_cast<void*>(LoadLibraryA(kDriverFile)); }
void* symbol_of(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), name));
}
#else
constexpr const char* kDriverFile = "libcuda.so.1";
void* open_driver() { return dlopen(kDriverFile, RTLD_NOW | RTLD_LOCAL); }
void* symbol_of(void* library, const char* name) { return dlsym(library, name); }
#endif

std::string describe_error(const Driver& driver, int error) {
  const char* text = nullptr;
  driver.cuGetErrorString(error, &text);
  return std::string(text != nullptr ? text : "unknown error") + " (" + std::to_string(error) + ")";
}

Driver find_driver() {
  Driver driver{};
  void* library = open_driver();
  if (library == nullptr) {
    driver.problem = std::string("there is no ") + kDriverFile + ", which comes with NVIDIA's driver";
    return driver;
  }
  const std::pair<const char*, void*> entries[] = {
      {"cuInit", &driver.cuInit},
      {"cuGetErrorString", &driver.cuGetErrorString},
      {"cuCtxGetCurrent", &driver.cuCtxGetCurrent},
      {"cuModuleLoadData", &driver.cuModuleLoadData},
      {"cuModuleGetFunction", &driver.cuModuleGetFunction},
      {"cuLaunchKernel", &driver.cuLaunchKernel},
      {"cuMemAllocAsync", &driver.cuMemAllocAsync},
      {"cuMemFreeAsync", &driver.cuMemFreeAsync},
      {"cuMemsetD32Async", &driver.cuMemsetD32Async},
  };
  for (const auto& entry : entries) {
    void* const found = symbol_of(library, entry.first);
    if (found == nullptr) {
      driver.problem = std::string(kDriverFile) + " has no " + entry.first + ": CUDA 11.2 or newer is needed";
      return driver;
    }
    std::memcpy(entry.second, &found, sizeof found);
  }
  void* const get_id = symbol_of(library, "cuCtxGetId");
  std::memcpy(&driver.cuCtxGetId, &get_id, sizeof get_id);
  if (const int error = driver.cuInit(0)) driver.problem = "CUDA could not be started: " + describe_error(driver, error);
  return driver;
}

const Driver& the_driver() {
  static const Driver driver = find_driver();
  return driver;
}

const Driver& working_driver() {
  const Driver& driver = the_driver();
  if (!driver.problem.empty()) throw std::runtime_error("quark: no CUDA kernel can run: " + driver.problem);
  return driver;
}

void check(const Driver& driver, int error, const std::string& what) {
  if (error != 0) throw std::runtime_error("quark: " + what + ": " + describe_error(driver, error));
}

// The one kernel with what comes before all of them, so that a device compiles only what is used.
std::string ptx_of(const std::string& kernel) {
  static const std::string kEntry = ".visible .entry ";
  static const std::string all(quark_ptx_begin, quark_ptx_end);
  const size_t begin = all.find(kEntry + kernel + "(");
  if (begin == std::string::npos) throw std::runtime_error("quark: there is no CUDA kernel " + kernel);
  const size_t end = all.find(kEntry, begin + 1);
  return all.substr(0, all.find(kEntry)) + all.substr(begin, end == std::string::npos ? end : end - begin);
}

// Contexts come and go, and a new one may have the address of an old one.
uint64_t current_context(const Driver& driver) {
  void* context = nullptr;
  check(driver, driver.cuCtxGetCurrent(&context), "no CUDA context");
  if (context == nullptr) throw std::runtime_error("quark: the calling thread has no CUDA context");
  unsigned long long id = reinterpret_cast<uintptr_t>(context);
  if (driver.cuCtxGetId != nullptr) check(driver, driver.cuCtxGetId(context, &id), "no CUDA context");
  return id;
}

void* function_of(const Driver& driver, const std::string& kernel) {
  static std::mutex mutex;
  static std::map<std::pair<uint64_t, std::string>, void*> functions;
  const std::pair<uint64_t, std::string> key(current_context(driver), kernel);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = functions.find(key);
  if (known != functions.end()) return known->second;
  void* module = nullptr;
  void* function = nullptr;
  check(driver, driver.cuModuleLoadData(&module, ptx_of(kernel).c_str()), "loading the CUDA kernel " + kernel);
  check(driver, driver.cuModuleGetFunction(&function, module, kernel.c_str()), "finding the CUDA kernel " + kernel);
  functions.emplace(key, function);
  return function;
}

}  // namespace

const std::string& driver_problem() { return the_driver().problem; }

void launch(const std::string& kernel, int64_t blocks, int threads, const void* argument, void* stream) {
  const Driver& driver = working_driver();
  if (blocks > INT32_MAX) throw std::runtime_error("quark: a tensor too large for the CUDA kernel " + kernel);
  void* arguments[] = {const_cast<void*>(argument)};
  const int error = driver.cuLaunchKernel(function_of(driver, kernel), static_cast<unsigned>(blocks), 1, 1,
                                          static_cast<unsigned>(threads), 1, 1, 0, stream, arguments, nullptr);
  check(driver, error, "starting the CUDA kernel " + kernel);
}

DeviceInteger::DeviceInteger(void* stream) : stream_(stream) {
  const Driver& driver = working_driver();
  check(driver, driver.cuMemAllocAsync(&address_, sizeof(int32_t), stream), "allocating 4 bytes on the CUDA device");
  const int error = driver.cuMemsetD32Async(address_, 0, 1, stream);
  if (error != 0) driver.cuMemFreeAsync(address_, stream);
  check(driver, error, "setting 4 bytes on the CUDA device");
}

DeviceInteger::~DeviceInteger() { the_driver().cuMemFreeAsync(address_, stream_); }

int32_t* DeviceInteger::pointer() const { return reinterpret_cast<int32_t*>(address_); }

}  // namespace gpu
}  // namespace quark
