// What the cycle model knows of a board. Every figure that comes out of it is a
// figure of the model, not of hardware.
#ifndef QPU_SRC_EMU_BOARD_HPP
#define QPU_SRC_EMU_BOARD_HPP

#include <cstdint>

namespace qpu::emu {

// Clocks are those of the V3D. One instruction takes 4.
struct Board {
  const char* name = "";
  double clockHz = 0;
  std::uint32_t tmuL1Clocks = 0;      // request to data, hit in the TMU's cache
  std::uint32_t tmuL2Clocks = 0;
  std::uint32_t tmuMemoryClocks = 0;
  std::uint32_t tmuRequestClocks = 0;  // between the requests that one TMU takes
  std::uint32_t fetchL2Clocks = 0;     // of a line of instructions or uniforms
  std::uint32_t fetchMemoryClocks = 0;
  double memoryBytesPerClock = 0;     // SDRAM, reads and writes together
  double l2BytesPerClock = 0;         // V3D L2, all slices together
  std::uint32_t dmaStoreClocks = 0;   // set-up of one transfer
  std::uint32_t dmaStoreRowClocks = 0;
  std::uint32_t dmaLoadClocks = 0;
  std::uint32_t dmaLoadRowClocks = 0;
  std::uint32_t sfuClocks = 0;        // beyond the instructions that write and read it
  std::uint32_t l1Bytes = 0;          // of one TMU, direct mapped
  std::uint32_t l2Bytes = 0;
  std::uint32_t icacheBytes = 0;      // of one slice
  std::uint32_t uniformCacheBytes = 0;

  double peakFlops() const { return clockHz * 12 * 4 * 2; }
};

extern const Board kPi1, kPiZero, kPi2, kPi3, kPiZero2;
extern const Board& kDefaultBoard;  // Pi 3

// Null for an unknown name.
const Board* findBoard(const char* name);

}  // namespace qpu::emu

#endif
