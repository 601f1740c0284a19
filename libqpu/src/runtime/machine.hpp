// The machine that this process runs on, and its VideoCore. The VideoCore is opened when it is
// first used. The process releases the VideoCore when the process ends, both on exit() and on a
// signal.
#ifndef QPU_SRC_RUNTIME_MACHINE_HPP
#define QPU_SRC_RUNTIME_MACHINE_HPP

#include <memory>
#include <string>

#include "runtime/device.hpp"

namespace qpu::runtime {

struct Opened {
  std::shared_ptr<Device> device;  // if null, `fault` contains the reason
  std::string fault;
};

// Opens the device. Each process attempts to open the device only once.
const Opened& openDevice();
// Returns the result of openDevice() without opening the device, or null if openDevice() has not
// been called.
const Opened* openedDevice();

Host host();
// Returns a number that increases when the host is replaced.
unsigned hostGeneration();

// Replaces the machine with a test double while the object exists. Programs and arrays that are
// created during this time must be destroyed before this object.
class WithHost {
 public:
  explicit WithHost(const Host& host);
  WithHost(const WithHost&) = delete;
  WithHost& operator=(const WithHost&) = delete;
  ~WithHost();

 private:
  Host before_;
};

// Disables the QPUs and releases GPU memory when the process calls exit(), and on each fatal signal
// for which the default action is set.
void closeWhenProcessEnds(const std::shared_ptr<Device>& device);

}  // namespace qpu::runtime

#endif
