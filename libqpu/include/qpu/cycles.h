// Statistics of a run on the emulator. The statistics come from the emulator's model of a board and
// were not measured on hardware.
#ifndef QPU_CYCLES_H
#define QPU_CYCLES_H

#include <cstdint>

namespace qpu {

// Counters are sums over the QPUs. `clocks` counts V3D clocks. An instruction takes four V3D
// clocks. All values are zero if the kernel has not run on the emulator.
struct Cycles {
  const char* board;  // name of the modelled board; "" if the kernel has not run on the emulator
  double clockHz;
  std::uint64_t instructions;
  std::uint64_t clocks;  // duration from the start of the launch until the last QPU has finished
  std::uint64_t stalledOnTmu;
  std::uint64_t stalledOnVpm;
  std::uint64_t stalledOnOther;  // waits for uniforms, semaphores, the mutex and instructions
  std::uint64_t tmuBytes;
  std::uint64_t memoryReadBytes;
  std::uint64_t memoryWriteBytes;
  std::uint64_t launches;
  // The time that starting and ending these launches would add with the backend vc4-registers or
  // vc4-mailbox.
  double registersLaunchSeconds;
  double mailboxLaunchSeconds;

  // The time that the kernels alone take, without the overhead of launches.
  double seconds() const { return clockHz > 0 ? static_cast<double>(clocks) / clockHz : 0; }
};

}  // namespace qpu

#endif
