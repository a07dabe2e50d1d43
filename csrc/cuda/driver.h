// NVIDIA's driver, looked up when it is first needed: this library is linked to nothing of CUDA's, and works without.
#pragma once

#include <cstdint>
#include <string>

namespace quark {
namespace gpu {

// Why no kernel can run in this process, as text for people; empty if the driver was found. A machine with a driver may
// still have no device.
const std::string& driver_problem();

// Runs a kernel of kernels.cu with one argument, in the calling thread's current context and on that context's stream.
// The first use in a context compiles the kernel for its device. Throws std::runtime_error.
void launch(const std::string& kernel, int64_t blocks, int threads, const void* argument, void* stream);

// One int32 of the device's memory, 0 at first, for work on one stream.
class DeviceInteger {
 public:
  explicit DeviceInteger(void* stream);
  ~DeviceInteger();
  DeviceInteger(const DeviceInteger&) = delete;
  DeviceInteger& operator=(const DeviceInteger&) = delete;
  int32_t* pointer() const;

 private:
  void* stream_;
  uint64_t address_ = 0;
};

}  // namespace gpu
}  // namespace quark
