// What the cycle model knows of a board. Every figure that comes out of it is a
// figure of the model, not of hardware. docs/model.md explains the parameters.
#ifndef QPU_SRC_EMU_BOARD_HPP
#define QPU_SRC_EMU_BOARD_HPP

namespace qpu::emu {

// Clocks are those of the V3D. One instruction takes 4. A row of DMA is moved in
// bursts of up to 16 words; each costs a part of its own and a part per word.
struct Board {
  const char* name = "";
  double clockHz = 0;
  double tmuL1Clocks = 0;       // request to data, hit in the TMU's cache
  double tmuL2Clocks = 0;
  double tmuMemoryClocks = 0;
  double tmuRequestClocks = 0;  // between the requests that one TMU takes
  double fetchL2Clocks = 0;     // of a line of instructions or uniforms
  double fetchMemoryClocks = 0;
  double l2BytesPerClock = 0;   // V3D L2, all slices together
  double memoryBytesPerSecond = 0;  // SDRAM, reads and writes together
  double pageMissNs = 0;        // for which the SDRAM is busy when it opens a page
  double storeNs = 0;           // of one transfer, besides its bursts
  double storeBurstNs = 0;
  double storeWordNs = 0;
  double loadNs = 0;
  double loadBurstNs = 0;
  double loadWordNs = 0;
  double vpmPortClocks = 0;     // for which the VPM is busy with one vector
  double vpmSetupClocks = 0;    // from a read setup to its first vector
  double semaphoreClocks = 0;   // from a release to the QPU that waits for it
  double sfuClocks = 0;         // beyond the instructions that write and read it
  double l1Bytes = 0;           // of one TMU, direct mapped
  double l2Bytes = 0;
  double icacheBytes = 0;       // of one slice
  double uniformCacheBytes = 0;
  double registersLaunchUs = 0;  // start and end of a launch, by backend
  double mailboxLaunchUs = 0;

  double peakFlops() const { return clockHz * 12 * 4 * 2; }
  double memoryBytesPerClock() const { return memoryBytesPerSecond / clockHz; }
  double clocksOfNs(double ns) const { return ns * 1e-9 * clockHz; }
};

extern const Board kPi1, kPiZero, kPi2, kPi3, kPiZero2;
extern const Board& kDefaultBoard;  // Pi 3

// Null for an unknown name.
const Board* findBoard(const char* name);

}  // namespace qpu::emu

#endif
