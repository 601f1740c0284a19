// Estimates how long a scheduled block takes, including stalls for TMU results and the DMA.
// Estimates are only compared with each other, so only their order matters.
#ifndef QPU_SRC_COMPILER_SCHEDULE_ESTIMATE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_ESTIMATE_HPP

#include <array>
#include <cstdint>

#include "compiler/schedule.hpp"

namespace qpu::compiler {

constexpr std::size_t kDelaySlots = 3;

// The slot before which the branch at the end of a block is inserted. The slots from there on fill its delay slots.
std::size_t branchAt(const ScheduledBlock& block, bool isConditional);

struct Surroundings {
  std::array<std::uint32_t, 2> inFlight{};  // requests of each TMU that are outstanding before the block
  bool repeats = false;                     // the block is in a loop
  bool branches = false;                    // the block ends with a conditional branch to itself
};

// For one execution of the block, in instructions.
struct Estimate {
  double total = 0;        // with stalls
  double stalls = 0;
  double totalIfSlow = 0;  // like `total`, with the TMUs and memory at the slow end of their ranges
};

Estimate estimate(const ScheduledBlock& block, const Surroundings& around);

}  // namespace qpu::compiler

#endif
