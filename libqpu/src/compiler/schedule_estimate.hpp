// Estimates how long a scheduled block takes, including stalls for TMU results and DMA transfers.
// Estimates are only compared with each other, so their absolute values do not matter.
#ifndef QPU_SRC_COMPILER_SCHEDULE_ESTIMATE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_ESTIMATE_HPP

#include <array>
#include <cstdint>

#include "compiler/schedule.hpp"

namespace qpu::compiler {

constexpr std::size_t kDelaySlots = 3;

// Returns the index of the slot before which the block's final branch is inserted. The slots from
// this index on become the branch's delay slots.
std::size_t branchAt(const ScheduledBlock& block, bool isConditional);

struct Surroundings {
  // Indexed by TMU: requests that are outstanding at the start of the block.
  std::array<std::uint32_t, 2> inFlight{};
  bool repeats = false;                     // true if the block is in a loop
  bool branches = false;                    // true if the block ends with a conditional branch to itself
  int qpus = 1;                             // the number of QPUs that compete for DMA
};

// The time for one execution of the block, in instructions.
struct Estimate {
  double total = 0;        // the time including stalls
  double stalls = 0;
  double totalIfSlow = 0;  // like `total`, but with the slowest TMUs and memory that the model's ranges allow
};

Estimate estimate(const ScheduledBlock& block, const Surroundings& around);

}  // namespace qpu::compiler

#endif
