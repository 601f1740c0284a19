// The cycle model of the resources that the QPUs share: caches, memory and DMA engines. The model
// computes times and contains no data. The model's functions must be called in the order of their
// clocks.
#ifndef QPU_SRC_EMU_TIMING_HPP
#define QPU_SRC_EMU_TIMING_HPP

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "emu/alu.hpp"
#include "emu/board.hpp"

namespace qpu::emu {

using Clock = std::uint64_t;
constexpr Clock kNever = UINT64_MAX;
// A time in fractions of a clock.
using Ticks = std::uint64_t;
constexpr unsigned kTickBits = 8;
constexpr std::uint32_t kLineBytes = 64;

// The address spaces. All address spaces share a single range of cache line numbers.
enum class Space : std::uint32_t { Memory, Code = 1U << 26U, Uniforms = 2U << 26U };
inline std::uint32_t lineOf(Space space, std::uint32_t address) {
  return static_cast<std::uint32_t>(space) | address / kLineBytes;
}

// The tags of a cache, and the clock at which each cache line arrives. The number of sets is a
// power of 2.
class Cache {
 public:
  // Empties the cache.
  void reset(std::uint32_t bytes, std::uint32_t ways);
  // Returns the clock at which the cache line arrives, or null if the line is not in the cache. The
  // cache records the call as a use of the line.
  const Clock* find(std::uint32_t line);
  void put(std::uint32_t line, Clock arrives);

 private:
  struct Way {
    std::uint32_t line = UINT32_MAX;
    std::uint32_t used = 0;  // time of the last use; if it is before reset_, the way is empty
    Clock arrives = 0;
  };
  Way* set(std::uint32_t line) { return &ways_[std::size_t{line & (sets_ - 1)} * perSet_]; }

  std::uint32_t perSet_ = 0;
  std::uint32_t sets_ = 0;
  std::uint32_t time_ = 0;
  std::uint32_t reset_ = 0;  // time of the last reset
  std::vector<Way> ways_;
};

// A resource that handles one request at a time.
class Channel {
 public:
  // Returns the time at which a request begins. The request arrives at `now` and takes `ticks`.
  Clock take(Clock now, Ticks ticks) { return takeTicks(now << kTickBits, ticks) >> kTickBits; }
  Ticks takeTicks(Ticks now, Ticks ticks) {
    const Ticks begin = now > free_ ? now : free_;
    free_ = begin + ticks;
    return begin;
  }

 private:
  Ticks free_ = 0;
};

struct Traffic {
  std::uint64_t readBytes = 0;
  std::uint64_t writeBytes = 0;
};

class Timing {
 public:
  // Resets the model to its state after power-up.
  void reset(const Board& board);

  // Model the instruction cache of a slice. codeLine() returns the time at which a cache line
  // arrives. If the line is not in the cache, codeLine() returns kNever, and the caller must call
  // fetchCode().
  Clock codeLine(std::uint32_t slice, std::uint32_t line);
  Clock fetchCode(std::uint32_t slice, std::uint32_t line, Clock now);
  Clock uniformLine(std::uint32_t slice, std::uint32_t line, Clock now);

  // Returns the time at which the words at the 16 addresses arrive. `unit` is the number of a
  // TMU, counted over all slices.
  Clock tmu(std::uint32_t unit, Clock now, const Vector& addresses);

  // Transfers a row, starting at `now`. Returns the time at which the engine is free again.
  Ticks dmaRow(bool load, std::uint32_t address, std::uint32_t bytes, Ticks now);
  Ticks dmaSetup(bool load) const { return costs(load).setup; }

  // Returns the time at which the VPM reads or writes a vector.
  Clock vpm(Clock now) { return vpmPort_.take(now, vpmTicks_); }
  Clock vpmSetup() const { return vpmSetup_; }
  Clock semaphore() const { return semaphore_; }
  Clock sfu() const { return sfu_; }

  const Traffic& traffic() const { return traffic_; }

 private:
  struct DmaCosts {
    Ticks setup = 0, burst = 0, word = 0;
  };
  const DmaCosts& costs(bool load) const { return load ? loads_ : stores_; }
  Clock l2Line(std::uint32_t line, Clock now, Clock hit, Clock miss);
  Ticks takeMemory(std::uint32_t address, Ticks now, Ticks ticks, Ticks& opening);

  static constexpr std::uint32_t kSlices = 3;
  static constexpr std::uint32_t kTmus = 6;

  // The open page of each SDRAM bank. The model has 8 interleaved banks with pages of 4 KB.
  static constexpr std::uint32_t kBanks = 8;
  static constexpr std::uint32_t kPageBytes = 4096;

  std::array<Cache, kSlices> code_, uniforms_;
  std::array<Cache, kTmus> l1_;
  std::array<Channel, kTmus> tmus_;
  Cache l2_;
  Channel l2Port_, memory_, vpmPort_;
  std::array<std::uint32_t, kBanks> pages_{};
  Ticks l2Ticks_ = 0, memoryTicks_ = 0, tmuTicks_ = 0, vpmTicks_ = 0, pageTicks_ = 0;
  Clock tmuL1_ = 0, tmuL2_ = 0, tmuMemory_ = 0, fetchL2_ = 0, fetchMemory_ = 0;
  Clock vpmSetup_ = 0, semaphore_ = 0, sfu_ = 0;
  DmaCosts loads_, stores_;
  Traffic traffic_;
};

// A DMA engine. An engine executes the transfers of all QPUs one after the other, row by row.
class Engine {
 public:
  Engine(Timing& timing, bool load) : timing_(timing), load_(load) {}

  void reset() {
    jobs_.clear();
    next_ = kNever;
  }

  // A transfer of rows. The first row starts at `address` in memory, and the starts of
  // consecutive rows are `pitch` bytes apart.
  struct Job {
    std::uint32_t qpu;
    std::uint32_t rows;
    std::uint32_t rowBytes;
    std::uint32_t address;
    std::uint32_t pitch;
  };
  void start(const Job& job, Clock now);
  // Returns the clock of the next row, or kNever if the engine is idle.
  Clock next() const { return next_ == kNever ? kNever : next_ >> kTickBits; }
  // Transfers a row. Returns the QPU whose transfer is complete, or kNone.
  static constexpr std::uint32_t kNone = UINT32_MAX;
  std::uint32_t step(Clock& ended);

 private:
  Timing& timing_;
  bool load_;
  std::deque<Job> jobs_;
  Ticks next_ = kNever;
};

}  // namespace qpu::emu

#endif
