// The machine that this process runs on, and its VideoCore. The VideoCore is opened on first use
// and released when the process ends, however it ends.
#ifndef QPU_SRC_RUNTIME_MACHINE_HPP
#define QPU_SRC_RUNTIME_MACHINE_HPP

#include <memory>
#include <string>

#include "runtime/device.hpp"

namespace qpu::runtime {

struct Opened {
  std::shared_ptr<Device> device;  // null: see `fault`
  std::string fault;
};

// Opens the device. This is attempted only once per process.
const Opened& openDevice();
// Returns the result of openDevice() without opening the device; null if openDevice() was not
// called.
const Opened* openedDevice();

Host host();
// Increases when the host is replaced.
unsigned hostGeneration();

// Replaces the machine with a test double. Programs and arrays that are created in the meantime
// must be destroyed before this object.
class WithHost {
 public:
  explicit WithHost(const Host& host);
  WithHost(const WithHost&) = delete;
  WithHost& operator=(const WithHost&) = delete;
  ~WithHost();

 private:
  Host before_;
};

// Disables the QPUs and releases GPU memory on exit() and on fatal signals whose action is
// the default.
void closeWhenProcessEnds(const std::shared_ptr<Device>& device);

}  // namespace qpu::runtime

#endif
