// The cycle model of what QPUs share: caches, memory and the DMA engines. It
// carries no data. Callers come in order of their clocks.
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
constexpr std::uint32_t kLineBytes = 64;

// What is fetched, in one space of line numbers.
enum class Space : std::uint32_t { Memory, Code = 1U << 26U, Uniforms = 2U << 26U };
inline std::uint32_t lineOf(Space space, std::uint32_t address) {
  return static_cast<std::uint32_t>(space) | address / kLineBytes;
}

// Tags of a cache, with the clock at which each line has arrived. The number of
// sets is a power of 2.
class Cache {
 public:
  // Nothing is in it any more.
  void reset(std::uint32_t bytes, std::uint32_t ways);
  // Null when the line is not there. Counts as a use.
  const Clock* find(std::uint32_t line);
  void put(std::uint32_t line, Clock arrives);

 private:
  struct Way {
    std::uint32_t line = UINT32_MAX;
    std::uint32_t used = 0;  // when; not in the cache when that was before it was reset
    Clock arrives = 0;
  };
  Way* set(std::uint32_t line) { return &ways_[std::size_t{line & (sets_ - 1)} * perSet_]; }

  std::uint32_t perSet_ = 0;
  std::uint32_t sets_ = 0;
  std::uint32_t time_ = 0;
  std::uint32_t reset_ = 0;  // the time of that
  std::vector<Way> ways_;
};

// Something that takes one piece of work at a time.
class Channel {
 public:
  // When work of `ticks` (1/256 clocks) that is there at `now` begins.
  Clock take(Clock now, std::uint64_t ticks) {
    const std::uint64_t from = now << kBits;
    const std::uint64_t begin = from > free_ ? from : free_;
    free_ = begin + ticks;
    return begin >> kBits;
  }
  Clock free() const { return free_ >> kBits; }
  static std::uint64_t ticks(double clocks);

 private:
  static constexpr unsigned kBits = 8;
  std::uint64_t free_ = 0;
};

struct Traffic {
  std::uint64_t readBytes = 0;
  std::uint64_t writeBytes = 0;
};

class Timing {
 public:
  // As after power up. The board must outlive what comes.
  void reset(const Board& board);

  // Instruction lines of a slice. When it has arrived, or kNever if it is not in
  // the cache; then fetch it.
  Clock codeLine(std::uint32_t slice, std::uint32_t line);
  Clock fetchCode(std::uint32_t slice, std::uint32_t line, Clock now);
  Clock uniformLine(std::uint32_t slice, std::uint32_t line, Clock now);

  // When the words at the 16 addresses have arrived. `unit` counts the TMUs of
  // all slices.
  Clock tmu(std::uint32_t unit, Clock now, const Vector& addresses);

  // One row of a transfer that is ready at `now`; when the engine is free again.
  Clock dmaRow(bool load, std::uint32_t bytes, Clock now);
  Clock dmaSetup(bool load) const {
    return load ? board_->dmaLoadClocks : board_->dmaStoreClocks;
  }

  const Traffic& traffic() const { return traffic_; }
  const Board& board() const { return *board_; }

 private:
  Clock l2Line(std::uint32_t line, Clock now, Clock hit, Clock miss);

  static constexpr std::uint32_t kSlices = 3;
  static constexpr std::uint32_t kTmus = 6;

  const Board* board_ = nullptr;
  std::array<Cache, kSlices> code_, uniforms_;
  std::array<Cache, kTmus> l1_;
  std::array<Channel, kTmus> tmus_;
  Cache l2_;
  Channel l2Port_, memory_;
  std::uint64_t l2Ticks_ = 0, memoryTicks_ = 0, tmuTicks_ = 0;
  Traffic traffic_;
};

// A DMA engine: transfers of all QPUs one after the other, row by row.
class Engine {
 public:
  Engine(Timing& timing, bool load) : timing_(timing), load_(load) {}

  void reset() {
    jobs_.clear();
    next_ = kNever;
  }

  void start(std::uint32_t qpu, std::uint32_t rows, std::uint32_t rowBytes, Clock now);
  // The clock of its next row, kNever when idle.
  Clock next() const { return next_; }
  // Moves one row. The QPU whose transfer that was the end of, else kNone.
  static constexpr std::uint32_t kNone = UINT32_MAX;
  std::uint32_t step(Clock& ended);

 private:
  struct Job {
    std::uint32_t qpu;
    std::uint32_t rows;
    std::uint32_t rowBytes;
  };
  Timing& timing_;
  bool load_;
  std::deque<Job> jobs_;
  Clock next_ = kNever;
};

}  // namespace qpu::emu

#endif
