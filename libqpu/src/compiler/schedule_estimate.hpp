// How long a scheduled block takes, with what it waits for: results of the TMUs and the DMA. A guess for choosing
// between schedules; only their order counts.
#ifndef QPU_SRC_COMPILER_SCHEDULE_ESTIMATE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_ESTIMATE_HPP

#include <array>
#include <cstdint>

#include "compiler/schedule.hpp"

namespace qpu::compiler {

constexpr std::size_t kDelaySlots = 3;

// The slot that the branch at the end of a block is put before. The slots from there on fill its delay slots.
std::size_t branchAt(const ScheduledBlock& block, bool isConditional);

struct Surroundings {
  std::array<std::uint32_t, 2> inFlight{};  // requests of each TMU that are outstanding before the block
  bool repeats = false;                     // many runs of the block follow each other
  bool branches = false;                    // the block ends with a conditional branch to itself
};

// Of one run of the block, in instructions.
struct Estimate {
  double takes = 0;     // with what it waits
  double waits = 0;
  double whenSlow = 0;  // as `takes`, with TMUs and memory at the slow end of their ranges
};

Estimate estimate(const ScheduledBlock& block, const Surroundings& around);

}  // namespace qpu::compiler

#endif
