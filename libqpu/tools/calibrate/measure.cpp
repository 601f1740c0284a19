// A QPU instruction takes four clocks. The latency of a TMU load is counted from the request. An
// instruction that waits for the load executes when the latency has elapsed, and the next
// instruction executes four clocks later. A sequence of "mov tmu0_s, r2" and "ldtmu0" therefore
// takes the latency plus four clocks.
#include "tools/calibrate/measure.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

namespace qpu::calibrate {
namespace {

constexpr double kInstruction = 4;
constexpr double kLineBytes = 64;
constexpr double kLineInstructions = 8;
constexpr double kPageLines = 64;  // number of cache lines in a page of 4 KB
// Distance between pages in the same bank: 8 banks of 4 KB.
constexpr std::uint32_t kSameBank = 32768;
constexpr int kAllQpus = 12;
constexpr int kSlices = 3;
constexpr int kQpusOfSlice = 4;
constexpr const char* kHidden = "hidden by another limit";

std::string line(const std::string& name, const std::string& operands) {
  return name + " " + operands;
}

std::uint32_t dmaStore(std::uint32_t rows, std::uint32_t words) {
  return 0x80004000U | rows << 23U | words << 16U;
}
// In the setup word, 0 stands for 16 rows or words. Each memory row is loaded into its own VPM
// row.
std::uint32_t dmaLoad(std::uint32_t rows, std::uint32_t words) {
  return 0x80001000U | (words % 16) << 20U | (rows % 16) << 16U;
}

void useBackend(const char* name) {
  (void)setenv("QPU_BACKEND", name, 1);  // NOLINT(concurrency-mt-unsafe): there is one thread
}

class Measurer {
 public:
  Measurer(Bench& bench, const std::function<void(int)>& before)
      : bench_(bench), before_(before) {}

  std::vector<Measured> all() {
    const std::array<void (Measurer::*)(), kMeasurements> steps = {
        &Measurer::instructions, &Measurer::launches, &Measurer::caches,  &Measurer::pages,
        &Measurer::requests,     &Measurer::bus,      &Measurer::stores,  &Measurer::loads,
        &Measurer::port,         &Measurer::semaphores};
    for (const auto step : steps) {
      before_(++number_);
      const std::size_t first = found_.size();
      (void)bench_.worstSpread();
      (this->*step)();
      const double spread = bench_.worstSpread();
      for (std::size_t n = first; n < found_.size(); ++n) found_[n].spread = spread;
    }
    return found_;
  }

 private:
  void put(const char* parameter, double value) {
    found_.push_back({parameter, std::max(value, 0.0), "", number_, 0});
  }
  void putMissing(const char* parameter, const std::string& why) {
    found_.push_back({parameter, 0, why, number_, 0});
  }

  double clocks(const std::string& program, int qpus, std::uint32_t rounds) {
    return bench_.round(program, qpus, rounds).seconds * clockHz_;
  }
  double ns(double clocks) const { return clocks / clockHz_ * 1e9; }

  // Returns the number of clocks that fetching an instruction cache line takes. Measures a loop of
  // `instructions` instructions, and subtracts the time for executing the instructions.
  double fetching(int instructions, std::uint32_t rounds) {
    constexpr int kLoopOverhead = 5;
    Assembly a;
    a.loop([&](Assembly& body) { body.repeat(instructions - kLoopOverhead, {"nop"}); });
    return clocks(a.end(), 1, rounds) * kLineInstructions / instructions -
           kInstruction * kLineInstructions;
  }

  void instructions() {
    constexpr int kNops = 95;
    Assembly a;
    a.loop([](Assembly& body) { body.repeat(kNops, {"nop"}); });
    clockHz_ = kInstruction * (kNops + 5) / bench_.round(a.end(), 1, 200).seconds;
    put("clock_hz", clockHz_);

    Assembly sfu;
    constexpr int kUses = 32;
    sfu.loop([](Assembly& body) { body.repeat(kUses, {"mov sfu_recip, r0", "nop", "nop"}); });
    put("sfu_clocks", clocks(sfu.end(), kAllQpus, 20) / kUses -
                          kInstruction * (3 + 5.0 / kUses));

    constexpr int kInL2 = 1536;
    constexpr int kBeyondL2 = 16384;
    const double fromL2 = fetching(kInL2, 2);
    put("fetch_l2_clocks", fromL2);
    fetchMemory_ = fetching(kBeyondL2, 1);
    int size = 1024;
    while (size < kInL2 * 8 && fetching(2 * size / 8, 8) < fromL2 / 2) size *= 2;
    put("icache_bytes", size);
  }

  void launches() {
    struct Launcher {
      const char* backend;
      const char* parameter;
    };
    for (const Launcher launcher : {Launcher{"vc4-registers", "registers_launch_us"},
                                    Launcher{"vc4-mailbox", "mailbox_launch_us"}}) {
      if (bench_.isEmulator()) {
        put(launcher.parameter, bench_.launch(launcher.backend).seconds * 1e6);
        continue;
      }
      useBackend(launcher.backend);
      if (qpu_backend_name() == nullptr)
        putMissing(launcher.parameter, qpu_backend_reason());
      else
        put(launcher.parameter, bench_.launch(launcher.backend).seconds * 1e6);
      useBackend(bench_.backend().c_str());
    }
  }

  // Returns the latency of loads, each of which waits for the previous load. `next` computes the
  // next address in r2 while a load is in flight.
  double latency(const std::vector<std::string>& next, const std::vector<std::string>& before,
                 std::uint32_t rounds) {
    Assembly a;
    element(a, "r2", kBuffer);
    a.repeat(1, before);
    a.loop([&](Assembly& body) {
      for (const std::string& n : next) body << "mov tmu0_s, r2" << n + "; ldtmu0";
    });
    const auto loads = static_cast<double>(next.size());
    return (clocks(a.end(), 1, rounds) - 5 * kInstruction) / loads - kInstruction;
  }

  // Returns the latency of loads that are `stride` bytes apart in the first `bytes` bytes of the
  // buffer.
  double sweep(std::uint32_t stride, std::uint32_t bytes, std::uint32_t rounds) {
    constexpr int kLoads = 16;
    Assembly a;
    element(a, "ra10", kBuffer);
    a.set("r1", stride).set("ra11", bytes - 1).set("r0", 0);
    a << "mov r2, ra10";
    a.loop([](Assembly& body) {
      body.repeat(kLoads, {"mov tmu0_s, r2", "add r0, r0, r1; ldtmu0", "and r0, r0, ra11",
                           "add r2, r0, ra10"});
    });
    return (clocks(a.end(), 1, rounds) - 5 * kInstruction) / kLoads - 3 * kInstruction;
  }

  // Computes the addresses of the 16 words that start at `base`.
  static void element(Assembly& a, const std::string& to, const std::string& base) {
    a << "shl r0, element_number, 2" << "nop" << line("add", to + ", r0, " + base) << "nop";
  }

  void caches() {
    const double l1 = latency(std::vector<std::string>(8, "nop"), {}, 50);
    std::vector<std::string> inL2(3, "add r2, r2, r1");
    inL2.emplace_back("mov r2, ra10");
    const double l2 = latency(inL2, {"mov ra10, r2", "ldi r1, 4096"}, 50);
    sequential_ = sweep(64, kBufferBytes, 64);
    put("tmu_l1_clocks", l1);
    put("tmu_l2_clocks", l2);

    // Use eight passes, so that the cache misses in the first pass hardly affect the result.
    const auto fits = [&](std::uint32_t bytes, double limit) {
      return sweep(64, bytes, std::max(8 * bytes / 1024, 8U)) < limit;
    };
    const auto largest = [&](double limit) {
      std::uint32_t bytes = 1024;
      while (bytes < kBufferBytes / 32 && fits(2 * bytes, limit)) bytes *= 2;
      return bytes;
    };
    put("l1_bytes", largest((l1 + l2) / 2));
    put("l2_bytes", largest((l2 + sequential_) / 2));
  }

  // Compares loads that each open an SDRAM page with loads of which only one in 64 opens a page.
  void pages() {
    const double far = sweep(kSameBank, kBufferBytes, 64);
    page_ = std::max(far - sequential_, 0.0) / (1 - 1 / kPageLines);
    put("page_miss_ns", ns(page_));
    put("tmu_memory_clocks", sequential_ - page_ / kPageLines);
    put("fetch_memory_clocks", fetchMemory_ - page_ / kPageLines);
  }

  void requests() {
    constexpr int kRequests = 16;
    Assembly one;
    one << "ldi tmu_noswap, 1";
    element(one, "r2", kBuffer);
    one.repeat(3, {"mov tmu0_s, r2"});
    one.loop([](Assembly& body) { body.repeat(kRequests, {"mov tmu0_s, r2", "nop; ldtmu0"}); });
    one.repeat(3, {"nop; ldtmu0"});
    const double atTmu = clocks(one.end(), kAllQpus, 100) / kRequests / kQpusOfSlice;
    put("tmu_request_clocks", atTmu);

    // Each QPU reads four cache lines that evict each other from the L1 cache.
    Assembly all;
    all << "ldi tmu_noswap, 1" << "shl r0, ra1, 6" << "nop" << "add r1, r0, ra2";
    all << "mov ra10, r1" << "nop";
    element(all, "ra10", "ra10");
    all.set("r1", 4096) << "mov r0, ra10";
    for (const char* const to : {"ra11", "ra12", "ra13"})
      all << "add r0, r0, r1" << line("mov", std::string(to) + ", r0");
    all << "nop";
    all << "mov tmu0_s, ra10" << "mov tmu1_s, ra12" << "mov tmu0_s, ra11" << "mov tmu1_s, ra13";
    all.loop([](Assembly& body) {
      for (const auto& [first, second] :
           {std::array{"ra12", "ra10"}, std::array{"ra13", "ra11"}, std::array{"ra10", "ra12"},
            std::array{"ra11", "ra13"}})
        body << line("mov", std::string("tmu0_s, ") + first)
             << line("mov", std::string("tmu1_s, ") + second) << "nop; ldtmu0" << "nop; ldtmu1";
    });
    all.repeat(2, {"nop; ldtmu0", "nop; ldtmu1"});
    const double perLine = clocks(all.end(), kAllQpus, 200) / (8 * kAllQpus);
    if (perLine < 1.1 * atTmu / (2 * kSlices))
      putMissing("l2_bytes_per_clock", std::string(kHidden) + ": the TMUs");
    else
      put("l2_bytes_per_clock", kLineBytes / perLine);
    l2Line_ = perLine;
  }

  // All QPUs read the buffer. Each QPU reads two of every 24 cache lines.
  void bus() {
    constexpr int kUnrolled = 4;
    Assembly a;
    a << "ldi tmu_noswap, 1" << "shl r0, element_number, 2" << "nop" << "add ra10, r0, ra2";
    a << "shl r0, ra1, 7" << "nop";
    a.set("r2", 64) << "add r1, r0, r2";
    a.set("ra11", kAllQpus * 128).set("ra12", kBufferBytes - 1) << "nop";
    const std::vector<std::string> request = {"add tmu0_s, r0, ra10", "add tmu1_s, r1, ra10",
                                              "add r0, r0, ra11",     "and r0, r0, ra12",
                                              "add r1, r1, ra11",     "and r1, r1, ra12"};
    a.repeat(3, request);
    a.loop([&](Assembly& body) {
      body.repeat(kUnrolled, {request[0], request[1], request[2] + "; ldtmu0",
                              request[3] + "; ldtmu1", request[4], request[5]});
    });
    a.repeat(3, {"nop; ldtmu0", "nop; ldtmu1"});
    const double perLine = clocks(a.end(), kAllQpus, 100) / (2.0 * kUnrolled * kAllQpus);
    if (perLine < 1.1 * l2Line_)
      putMissing("memory_bytes_per_s", std::string(kHidden) + ": the L2");
    else
      put("memory_bytes_per_s", kLineBytes / (perLine - page_ / kPageLines) * clockHz_);
  }

  // Returns the number of clocks for a transfer that the program waits for. The wait and the next
  // setup are two instructions that do not overlap with the transfer.
  double transfer(bool load, std::uint32_t rows, std::uint32_t words) {
    constexpr int kTransfers = 16;
    Assembly a;
    a.set(load ? "vpm_rd_setup" : "vpm_wr_setup", load ? 0x90000000U | 4 * words : 0xc0000000U);
    a.set("r0", load ? dmaLoad(rows, words) : dmaStore(rows, words));
    a.loop([&](Assembly& body) {
      if (load)
        body.repeat(kTransfers,
                    {"mov vpm_rd_setup, r0", "mov vpm_ld_addr, ra2", "nop; read vpm_ld_wait"});
      else
        body.repeat(kTransfers,
                    {"mov vpm_wr_setup, r0", "mov vpm_st_addr, ra2", "nop; read vpm_st_wait"});
    });
    return (clocks(a.end(), 1, 20) - 5 * kInstruction) / kTransfers - 2 * kInstruction;
  }

  void dma(bool load, std::uint32_t rows, const std::array<const char*, 3>& parameters) {
    const double one = transfer(load, 1, 16);
    const double row = (transfer(load, rows, 16) - one) / (rows - 1);
    const double setup = one - row;
    const double ofOneWord = (transfer(load, 16, 1) - setup) / 16;
    const double word = std::max(row - ofOneWord, 0.0) / 15;
    put(parameters[0], ns(setup));
    put(parameters[1], ns(row - 16 * word));
    put(parameters[2], ns(word));
  }
  void stores() { dma(false, 64, {"store_ns", "store_burst_ns", "store_word_ns"}); }
  void loads() { dma(true, 16, {"load_ns", "load_burst_ns", "load_word_ns"}); }

  void port() {
    constexpr int kVectors = 16;
    constexpr std::uint32_t kRows = 0x1a00;  // horizontal 32-bit words, starting at row 0
    Assembly all;
    all.set("r1", kRows);
    all.loop([](Assembly& body) {
      body << "mov vpm_rd_setup, r1";
      body.repeat(3, {"nop"}).repeat(kVectors, {"mov r0, vpm"});
    });
    const double perVector = clocks(all.end(), kAllQpus, 50) / (kVectors * kAllQpus);
    const double issue = kInstruction * (kVectors + 9) / (kVectors * kAllQpus);
    if (perVector < 1.3 * issue)
      putMissing("vpm_port_clocks", std::string(kHidden) + ": the instructions; at most " +
                                        std::to_string(perVector));
    else
      put("vpm_port_clocks", perVector);

    Assembly one;
    one.set("r1", kRows | 1U << 20U);
    one.loop([](Assembly& body) {
      body.repeat(kVectors, {"mov vpm_rd_setup, r1", "mov r0, vpm"});
    });
    put("vpm_setup_clocks",
        (clocks(one.end(), 1, 50) - 5 * kInstruction) / kVectors - kInstruction);
  }

  // Two QPUs alternately wait for each other and release each other. The difference between two
  // loop lengths eliminates the unknown overhead of the loop.
  double exchanges(int times) {
    Assembly a;
    a << "nop" << "mov.sf r0, ra1";
    const int choice = a.size();
    a.repeat(4, {"nop"});
    const auto half = [&](const std::vector<std::string>& exchange) {
      a.loop([&](Assembly& body) { body.repeat(times, exchange); });
    };
    half({"srel 0", "sacq 1"});
    const int over = a.size();
    a.repeat(4, {"nop"});
    const int second = a.size();
    half({"sacq 0", "srel 1"});
    a.patch(choice, "allzc", second);
    // This branch is always taken, because the loop leaves the zero flag of its counter set.
    a.patch(over, "allzs", a.size());
    return clocks(a.end(), 2, 50);
  }
  void semaphores() {
    const double exchange = (exchanges(48) - exchanges(16)) / 32;
    put("semaphore_clocks", exchange / 2 - kInstruction);
  }

  Bench& bench_;
  const std::function<void(int)>& before_;
  int number_ = 0;
  std::vector<Measured> found_;
  double clockHz_ = 0;
  double sequential_ = 0, page_ = 0, fetchMemory_ = 0, l2Line_ = 0;  // in clocks
};

}  // namespace

const char* title(int measurement) {
  static constexpr std::array<const char*, kMeasurements> kTitles = {
      "clock, special functions and instruction cache",
      "launches by each backend",
      "TMU loads: latencies and cache sizes",
      "SDRAM pages",
      "request rates of the TMU and the L2",
      "the bus, with all QPUs reading",
      "DMA stores",
      "DMA loads",
      "the VPM port",
      "semaphores"};
  return kTitles.at(static_cast<std::size_t>(measurement - 1));
}

std::vector<Measured> measureAll(Bench& bench, const std::function<void(int)>& before) {
  return Measurer(bench, before).all();
}

}  // namespace qpu::calibrate
