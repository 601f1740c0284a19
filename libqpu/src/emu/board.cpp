#include "emu/board.hpp"

#include <cstring>

#include "emu/emulator.hpp"
#include "emu/model.hpp"

namespace qpu::emu {
namespace {

// The default V3D clock (v3d_freq in the Raspberry Pi documentation), and the clock of the LPDDR2
// memory, which is 400 MHz on BCM2835 and 450 MHz on BCM2836 and later.
struct Soc {
  const char* board;
  double clockHz;
  double memoryHz;
};
constexpr std::array<Soc, 5> kSocs = {{{"pi1", 250e6, 400e6},
                                       {"zero", 300e6, 400e6},
                                       {"pi2", 250e6, 450e6},
                                       {"pi3", 400e6, 450e6},
                                       {"zero2", 300e6, 450e6}}};
constexpr double kReferenceMemoryHz = 400e6;
constexpr double kPinBytesPerClock = 8;  // 32-bit bus, two transfers per clock

constexpr Amount clocks(double n) { return {n, Follows::V3d}; }
constexpr Amount ns(double n) { return {n, Follows::Time}; }
constexpr Amount atMemory(double n) { return {n, Follows::MemoryClock}; }
constexpr Amount pins(double n) { return {n, Follows::MemoryPins}; }
constexpr Amount plain(double n) { return {n, Follows::Nothing}; }

// The parameters of the cycle model. The three amounts are the value, the bound of its range that
// makes kernels faster, and the bound that makes kernels slower. This project has not measured any
// of the values on hardware. The source "guess" marks values for which no figure has been
// published. Some values are times in nanoseconds at a V3D clock of 250 MHz, but the bound that
// makes kernels faster is given in clocks. A bound in clocks assumes that the engine's speed
// depends only on the V3D clock.
constexpr std::array<Parameter, kParameters> kTable = {{
    {"clock_hz", &Board::clockHz, Unit::Hertz, {plain(0), plain(0), plain(0)}, "clock",
     "Raspberry Pi documentation: default v3d_freq of the board"},
    {"tmu_l1_clocks", &Board::tmuL1Clocks, Unit::Clocks, {clocks(36), clocks(24), clocks(48)},
     "memory latency", "VC4C's emulator: 9 instructions"},
    {"tmu_l2_clocks", &Board::tmuL2Clocks, Unit::Clocks, {clocks(48), clocks(36), clocks(72)},
     "memory latency", "VC4C's emulator: 12 instructions"},
    {"tmu_memory_clocks", &Board::tmuMemoryClocks, Unit::Clocks,
     {clocks(80), clocks(60), clocks(104)}, "memory latency",
     "VC4C's emulator: 20 instructions; the course project's table excludes higher values"},
    {"tmu_request_clocks", &Board::tmuRequestClocks, Unit::Clocks,
     {clocks(16), clocks(4), clocks(20)}, "caches", "guess: one element per clock"},
    {"fetch_l2_clocks", &Board::fetchL2Clocks, Unit::Clocks, {clocks(24), clocks(12), clocks(48)},
     "caches", "guess: half of a TMU load"},
    {"fetch_memory_clocks", &Board::fetchMemoryClocks, Unit::Clocks,
     {clocks(80), clocks(60), clocks(128)}, "memory latency", "guess: same as a TMU load"},
    {"l2_bytes_per_clock", &Board::l2BytesPerClock, Unit::BytesPerClock,
     {plain(16), plain(32), plain(8)}, "caches", "guess"},
    {"memory_bytes_per_s", &Board::memoryBytesPerSecond, Unit::BytesPerSecond,
     {pins(0.5), pins(0.8), pins(0.375)}, "bus",
     "the course project's table: at least 47 % of the SDRAM's pin bandwidth; "
     "VC4C issue 14: 1.2 GB/s read and written"},
    {"page_miss_ns", &Board::pageMissNs, Unit::Nanoseconds,
     {atMemory(0), atMemory(0), atMemory(36)}, "pages",
     "guess: hidden by other banks; slow: tRP + tRCD of LPDDR2"},
    {"store_ns", &Board::storeNs, Unit::Nanoseconds, {atMemory(157), clocks(33), ns(196)}, "stores",
     "Sugizaki at 250 MHz: 213 ns for one row of 16 words (300 MB/s)"},
    {"store_burst_ns", &Board::storeBurstNs, Unit::Nanoseconds,
     {atMemory(27), clocks(5.7), ns(34)}, "stores",
     "Sugizaki: 1.12 GB/s for 128 rows; QPULib's HeatMap: 16 rows of one word in 618 ns"},
    {"store_word_ns", &Board::storeWordNs, Unit::Nanoseconds,
     {atMemory(1.8), clocks(0.38), ns(2.3)}, "stores", "same as store_burst_ns"},
    {"load_ns", &Board::loadNs, Unit::Nanoseconds, {atMemory(242), clocks(51), ns(302)}, "loads",
     "Sugizaki at 250 MHz: 320 ns for one row of 16 words (200 MB/s)"},
    {"load_burst_ns", &Board::loadBurstNs, Unit::Nanoseconds,
     {atMemory(38), clocks(8), ns(48)}, "loads",
     "Sugizaki: 690 MB/s for 16 rows; the part per word is a guess, as for stores"},
    {"load_word_ns", &Board::loadWordNs, Unit::Nanoseconds,
     {atMemory(2.5), clocks(0.53), ns(3.1)}, "loads", "same as load_burst_ns"},
    {"vpm_port_clocks", &Board::vpmPortClocks, Unit::Clocks, {clocks(4), clocks(1), clocks(8)},
     "VPM port", "guess: 4 words per clock, like all data paths of a QPU"},
    {"vpm_setup_clocks", &Board::vpmSetupClocks, Unit::Clocks,
     {clocks(16), clocks(12), clocks(24)}, "VPM port",
     "Broadcom's guide: three instructions between a read setup and the first read"},
    {"semaphore_clocks", &Board::semaphoreClocks, Unit::Clocks,
     {clocks(12), clocks(0), clocks(40)}, "semaphores", "guess"},
    {"sfu_clocks", &Board::sfuClocks, Unit::Clocks, {clocks(0), clocks(0), clocks(4)}, "caches",
     "guess: hidden by the two instructions required in between"},
    {"l1_bytes", &Board::l1Bytes, Unit::Bytes, {plain(4096), plain(4096), plain(4096)}, "caches",
     "measured by vc4asm only"},
    {"l2_bytes", &Board::l2Bytes, Unit::Bytes, {plain(32768), plain(65536), plain(16384)},
     "caches", "guess"},
    {"icache_bytes", &Board::icacheBytes, Unit::Bytes, {plain(4096), plain(4096), plain(4096)},
     "caches", "measured by vc4asm only"},
    {"uniform_cache_bytes", &Board::uniformCacheBytes, Unit::Bytes,
     {plain(4096), plain(4096), plain(2048)}, "caches", "guess"},
    {"registers_launch_us", &Board::registersLaunchUs, Unit::Microseconds,
     {plain(25), plain(8), plain(34)}, "launch",
     "QPULib issue 9: 34 us in total with a small kernel; gpu_fft: 20 us in total"},
    {"mailbox_launch_us", &Board::mailboxLaunchUs, Unit::Microseconds,
     {plain(100), plain(76), plain(140)}, "launch",
     "gpu_fft: about 100 us; QPULib issue 9: 76 us more than with registers"},
}};

constexpr double amountAt(const Soc& soc, Unit unit, const Amount& a) {
  const double nsOfClock = 1e9 / soc.clockHz;
  double inNs = 0;
  switch (a.follows) {
    case Follows::Nothing: return a.number;
    case Follows::MemoryPins: return a.number * soc.memoryHz * kPinBytesPerClock;
    case Follows::V3d: inNs = a.number * nsOfClock; break;
    case Follows::Time: inNs = a.number; break;
    case Follows::MemoryClock: inNs = a.number * (kReferenceMemoryHz / soc.memoryHz); break;
  }
  return unit == Unit::Clocks ? inNs / nsOfClock : inNs;
}

constexpr Board board(const Soc& soc, Bound bound) {
  Board b;
  for (const Parameter& p : kTable)
    b.*p.member = amountAt(soc, p.unit, p.amounts[static_cast<std::size_t>(bound)]);
  b.name = soc.board;
  b.clockHz = soc.clockHz;
  return b;
}

constexpr std::array<Board, kSocs.size()> boards(Bound bound) {
  return {board(kSocs[0], bound), board(kSocs[1], bound), board(kSocs[2], bound),
          board(kSocs[3], bound), board(kSocs[4], bound)};
}
constexpr std::array<std::array<Board, kSocs.size()>, 3> kBoards = {
    boards(Bound::Value), boards(Bound::Fast), boards(Bound::Slow)};

}  // namespace

const Board kPi1 = kBoards[0][0];
const Board kPiZero = kBoards[0][1];
const Board kPi2 = kBoards[0][2];
const Board kPi3 = kBoards[0][3];
const Board kPiZero2 = kBoards[0][4];
const Board& kDefaultBoard = kPi3;

const std::array<Parameter, kParameters>& parameters() { return kTable; }

const char* name(Unit unit) {
  switch (unit) {
    case Unit::Hertz: return "Hz";
    case Unit::Clocks: return "clocks";
    case Unit::Nanoseconds: return "ns";
    case Unit::Microseconds: return "us";
    case Unit::BytesPerClock: return "bytes per clock";
    case Unit::BytesPerSecond: return "bytes per second";
    case Unit::Bytes: return "bytes";
  }
  return "";
}

const Board* findBoard(const char* name, Bound bound) {
  for (const Board& b : kBoards[static_cast<std::size_t>(bound)])
    if (std::strcmp(b.name, name) == 0) return &b;
  return nullptr;
}

const Board* findBoard(const char* name) {
  for (const Board* b : {&kPi1, &kPiZero, &kPi2, &kPi3, &kPiZero2})
    if (std::strcmp(b->name, name) == 0) return b;
  return nullptr;
}

double Report::seconds(const Board& b) const { return static_cast<double>(clocks) / b.clockHz; }

}  // namespace qpu::emu
