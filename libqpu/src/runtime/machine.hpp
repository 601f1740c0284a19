// The machine this process runs on, and its VideoCore, opened when first asked
// for and given back when the process ends, by whichever way.
#ifndef QPU_SRC_RUNTIME_MACHINE_HPP
#define QPU_SRC_RUNTIME_MACHINE_HPP

#include <memory>
#include <string>

#include "runtime/device.hpp"

namespace qpu::runtime {

struct Opened {
  std::shared_ptr<Device> device;  // null: see fault
  std::string fault;
};

// Tried once per process.
const Opened& openDevice();
// What openDevice() has found, without trying; null when it was not called.
const Opened* openedDevice();

Host host();
// Grows when another host takes the place.
unsigned hostGeneration();

// A double in the machine's place, for tests. Programs and arrays made meanwhile
// must be gone before it is.
class WithHost {
 public:
  explicit WithHost(const Host& host);
  WithHost(const WithHost&) = delete;
  WithHost& operator=(const WithHost&) = delete;
  ~WithHost();

 private:
  Host before_;
};

// Switches the QPUs off and gives GPU memory back on exit() and on signals that
// end a process, as far as the program leaves those to their default.
void closeWhenProcessEnds(const std::shared_ptr<Device>& device);

}  // namespace qpu::runtime

#endif
