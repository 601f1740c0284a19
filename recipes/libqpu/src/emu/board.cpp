#include "emu/board.hpp"

#include <cstring>

#include "emu/emulator.hpp"

namespace qpu::emu {
namespace {

// The one table of the cycle model. Nothing in it has been measured on hardware by
// this project; what says "guess" is not published either. Figures without a
// board are taken to be those of the V3D, the same on all, in its own clocks;
// what depends on memory follows its clock.
struct Figures {
  const char* name;
  std::uint64_t clockHz;  // Raspberry Pi documentation, table of default v3d_freq
  double memoryHz;        // LPDDR2 clock: 400 MHz on BCM2835, 450 MHz on BCM2836 and later
};

// VC4C issue 14: vector addition of 80..100 M elements/s on 12 QPUs, which is up
// to 1.2 GB/s read and written. Taken as the limit at 400 MHz and scaled. Board
// test: the same addition by 12 QPUs, 2^22 elements.
constexpr double kMemoryBytesPerSecond = 1.2e9;
constexpr double kMemoryHz = 400e6;
// The emulator of VC4C counts 9, 12 and 20 instructions of 4 clocks from request
// to data. Its memory latency is taken to be one of 250 MHz. Board test: 1000
// dependent loads at strides within L1, within L2 and beyond, clocks by
// performance counter 17.
constexpr std::uint32_t kTmuL1Clocks = 36;
constexpr std::uint32_t kTmuL2Clocks = 48;
constexpr std::uint64_t kTmuMemoryNanoseconds = 320;  // 80 clocks
// Guess: one element per clock, as for texels. Board test: 1000 requests to one
// line from one and from two QPUs of a slice.
constexpr std::uint32_t kTmuRequestClocks = 16;
// Guess: an instruction or uniform line from the L2 costs half of a TMU load.
// Board test: a loop of 1024 instructions, performance counters 20 and 21.
constexpr std::uint32_t kFetchL2Clocks = 24;
// Guess: 16 bytes per clock. Board test: 12 QPUs that read 16 KB again and again.
constexpr double kL2BytesPerClock = 16;
// A store of one row of 16 words. Whole programs that do nothing else at their
// limit: QPULib's HeatMap (512 x 512, 4 QPUs, Pi 1) takes 622 ns per vector
// stored, its Rot3D (2 QPUs, Pi 1) 667 ns, VC4CL's clpeak (112 MB/s, Pi 3) 571 ns;
// the last two are apart as the clocks of the memories are. Against them stands
// Sugizaki's measurement of bare transfers, 300 MB/s or 213 ns. A further row:
// his 1.12 GB/s of 128 rows. Board test: 1000 stores of 1, 2, 4, .. rows.
constexpr double kDmaStoreSeconds = 570e-9;
constexpr double kDmaStoreRowSeconds = 52e-9;
// Loads by Sugizaki's measurements alone, 200 MB/s of one row and 690 MB/s of 16
// rows at 250 MHz: 61 clocks and 19 per row. Board test: as for stores.
constexpr std::uint32_t kDmaLoadClocks = 61;
constexpr std::uint32_t kDmaLoadRowClocks = 19;
// Guess: the two instructions that must lie between hide all of it. Board test:
// 4 QPUs of a slice that use the SFU in every third instruction.
constexpr std::uint32_t kSfuClocks = 0;
// Measured by one party each (vc4asm, VC4C); the L2's and the uniforms' are
// guesses. Board test: strides, performance counters 20 to 29.
constexpr std::uint32_t kL1Bytes = 4096;
constexpr std::uint32_t kIcacheBytes = 4096;
constexpr std::uint32_t kUniformCacheBytes = 4096;
constexpr std::uint32_t kL2Bytes = 32768;

constexpr std::uint32_t rounded(double clocks) {
  const auto whole = static_cast<std::uint32_t>(clocks);
  return clocks - whole < 0.5 ? whole : whole + 1;
}

constexpr Board board(const Figures& f) {
  Board b;
  b.name = f.name;
  b.clockHz = static_cast<double>(f.clockHz);
  b.tmuL1Clocks = kTmuL1Clocks;
  b.tmuL2Clocks = kTmuL2Clocks;
  b.tmuMemoryClocks = static_cast<std::uint32_t>(kTmuMemoryNanoseconds * f.clockHz / 1000000000);
  b.tmuRequestClocks = kTmuRequestClocks;
  b.fetchL2Clocks = kFetchL2Clocks;
  b.fetchMemoryClocks = b.tmuMemoryClocks;
  b.memoryBytesPerClock = kMemoryBytesPerSecond * (f.memoryHz / kMemoryHz) / b.clockHz;
  b.l2BytesPerClock = kL2BytesPerClock;
  const auto atMemory = [&f, &b](double seconds) {
    return rounded(seconds * (kMemoryHz / f.memoryHz) * b.clockHz);
  };
  b.dmaStoreClocks = atMemory(kDmaStoreSeconds);
  b.dmaStoreRowClocks = atMemory(kDmaStoreRowSeconds);
  b.dmaLoadClocks = kDmaLoadClocks;
  b.dmaLoadRowClocks = kDmaLoadRowClocks;
  b.sfuClocks = kSfuClocks;
  b.l1Bytes = kL1Bytes;
  b.l2Bytes = kL2Bytes;
  b.icacheBytes = kIcacheBytes;
  b.uniformCacheBytes = kUniformCacheBytes;
  return b;
}

}  // namespace

const Board kPi1 = board({"pi1", 250000000, 400e6});
const Board kPiZero = board({"zero", 300000000, 400e6});
const Board kPi2 = board({"pi2", 250000000, 450e6});
const Board kPi3 = board({"pi3", 400000000, 450e6});
const Board kPiZero2 = board({"zero2", 300000000, 450e6});
const Board& kDefaultBoard = kPi3;

const Board* findBoard(const char* name) {
  for (const Board* b : {&kPi1, &kPiZero, &kPi2, &kPi3, &kPiZero2})
    if (std::strcmp(b->name, name) == 0) return b;
  return nullptr;
}

double Report::seconds(const Board& b) const { return static_cast<double>(clocks) / b.clockHz; }

}  // namespace qpu::emu
