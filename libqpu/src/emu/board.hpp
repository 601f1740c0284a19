// A board's parameters in the cycle model. All times derived from them are the model's, not the
// hardware's. docs/model.md explains the parameters.
#ifndef QPU_SRC_EMU_BOARD_HPP
#define QPU_SRC_EMU_BOARD_HPP

namespace qpu::emu {

// Clocks are V3D clocks; one instruction takes 4. A DMA row is transferred in bursts of up to 16
// words. A burst's time has a fixed part and a part per word.
struct Board {
  const char* name = "";
  double clockHz = 0;
  double tmuL1Clocks = 0;       // from request to data, for a hit in the TMU's cache
  double tmuL2Clocks = 0;
  double tmuMemoryClocks = 0;
  double tmuRequestClocks = 0;  // between two requests to one TMU
  double fetchL2Clocks = 0;     // for an instruction or uniform cache line
  double fetchMemoryClocks = 0;
  double l2BytesPerClock = 0;   // V3D L2, all slices together
  double memoryBytesPerSecond = 0;  // SDRAM, reads and writes together
  double pageMissNs = 0;        // during which the SDRAM is busy opening a page
  double storeNs = 0;           // per transfer, in addition to its bursts
  double storeBurstNs = 0;
  double storeWordNs = 0;
  double loadNs = 0;
  double loadBurstNs = 0;
  double loadWordNs = 0;
  double vpmPortClocks = 0;     // during which the VPM is busy with one vector
  double vpmSetupClocks = 0;    // from a read setup to its first vector
  double semaphoreClocks = 0;   // from a release until the waiting QPU continues
  double sfuClocks = 0;         // in addition to the instructions that write and read it
  double l1Bytes = 0;           // of one TMU, direct-mapped
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
