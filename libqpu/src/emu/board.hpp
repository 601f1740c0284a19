// The parameters of a board in the cycle model. All times that are derived from these parameters
// are results of the model and were not measured on hardware. docs/model.md explains the
// parameters.
#ifndef QPU_SRC_EMU_BOARD_HPP
#define QPU_SRC_EMU_BOARD_HPP

namespace qpu::emu {

// All clocks are V3D clocks. An instruction takes 4 clocks. A DMA transfer moves each row in bursts
// of up to 16 words. The time for a burst has a fixed part and a part that is proportional to the
// number of words.
struct Board {
  const char* name = "";
  double clockHz = 0;
  double tmuL1Clocks = 0;       // latency of a load from the TMU's own cache
  double tmuL2Clocks = 0;
  double tmuMemoryClocks = 0;
  double tmuRequestClocks = 0;  // minimum interval between two requests to one TMU
  double fetchL2Clocks = 0;     // time to fetch an instruction or uniform cache line from L2
  double fetchMemoryClocks = 0;
  double l2BytesPerClock = 0;   // throughput of the V3D L2 for all slices together
  double memoryBytesPerSecond = 0;  // throughput of the SDRAM for reads and writes together
  double pageMissNs = 0;        // time for which opening a page occupies the SDRAM
  double storeNs = 0;           // fixed time per transfer, in addition to its bursts
  double storeBurstNs = 0;
  double storeWordNs = 0;
  double loadNs = 0;
  double loadBurstNs = 0;
  double loadWordNs = 0;
  double vpmPortClocks = 0;     // time for which one vector occupies the VPM
  double vpmSetupClocks = 0;    // time from a read setup until its first vector can be read
  double semaphoreClocks = 0;   // time from a semaphore's release until the waiting QPU continues
  double sfuClocks = 0;         // time in addition to the instructions that write and read the SFU
  double l1Bytes = 0;           // size of one TMU's cache, which is direct-mapped
  double l2Bytes = 0;
  double icacheBytes = 0;       // size of one slice's instruction cache
  double uniformCacheBytes = 0;
  double registersLaunchUs = 0;  // time to start and end a launch, for each backend
  double mailboxLaunchUs = 0;

  double peakFlops() const { return clockHz * 12 * 4 * 2; }
  double memoryBytesPerClock() const { return memoryBytesPerSecond / clockHz; }
  double clocksOfNs(double ns) const { return ns * 1e-9 * clockHz; }
};

extern const Board kPi1, kPiZero, kPi2, kPi3, kPiZero2;
extern const Board& kDefaultBoard;  // the Pi 3

// Returns null if the name is unknown.
const Board* findBoard(const char* name);

}  // namespace qpu::emu

#endif
