// Statistics of a run, from the emulator's model of a board. Not measured on hardware.
#ifndef QPU_CYCLES_H
#define QPU_CYCLES_H

#include <cstdint>

namespace qpu {

// Counters are sums over the QPUs. Clocks are V3D clocks; one instruction takes four. All values
// are zero for a kernel that has not run on the emulator.
struct Cycles {
  const char* board;  // "" if there was no run
  double clockHz;
  std::uint64_t instructions;
  std::uint64_t clocks;  // from the start of the launch until the last QPU has finished
  std::uint64_t stalledOnTmu;
  std::uint64_t stalledOnVpm;
  std::uint64_t stalledOnOther;  // stalls for uniforms, semaphores, the mutex and instruction fetch
  std::uint64_t tmuBytes;
  std::uint64_t memoryReadBytes;
  std::uint64_t memoryWriteBytes;
  std::uint64_t launches;
  // Additional time to start and end these launches, per backend.
  double registersLaunchSeconds;
  double mailboxLaunchSeconds;

  // Time of the kernels alone, without the overhead of launches.
  double seconds() const { return clockHz > 0 ? static_cast<double>(clocks) / clockHz : 0; }
};

}  // namespace qpu

#endif
