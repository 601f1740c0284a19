// What a run took by the emulator's model of a board. Not measured on hardware.
#ifndef QPU_CYCLES_H
#define QPU_CYCLES_H

#include <cstdint>

namespace qpu {

// Counters are sums over the QPUs; clocks are those of V3D, one instruction takes
// four. All zero for a kernel that has not run on the emulator.
struct Cycles {
  const char* board;  // "" when there was no run
  double clockHz;
  std::uint64_t instructions;
  std::uint64_t clocks;  // from the start to the end of the last QPU
  std::uint64_t stalledOnTmu;
  std::uint64_t stalledOnVpm;
  std::uint64_t stalledOnOther;  // uniforms, semaphores, mutex, fetching instructions
  std::uint64_t tmuBytes;
  std::uint64_t memoryReadBytes;
  std::uint64_t memoryWriteBytes;
  std::uint64_t launches;
  // What starting and ending these launches takes besides, by backend.
  double registersLaunchSeconds;
  double mailboxLaunchSeconds;

  // Of the kernels alone, without launches.
  double seconds() const { return clockHz > 0 ? static_cast<double>(clocks) / clockHz : 0; }
};

}  // namespace qpu

#endif
