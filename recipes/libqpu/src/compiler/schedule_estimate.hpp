// How long a scheduled block takes, with what it waits for: results of the TMUs and the DMA. A guess for choosing
// between schedules; only their order counts.
#ifndef QPU_SRC_COMPILER_SCHEDULE_ESTIMATE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_ESTIMATE_HPP

#include <array>
#include <cstdint>

#include "compiler/schedule.hpp"

namespace qpu::compiler {

// Of one run, in instructions; with `repeats` of one among many that follow each other. `inFlight` are the requests of
// each TMU that are outstanding before the block.
double estimate(const ScheduledBlock& block, const std::array<std::uint32_t, 2>& inFlight, bool repeats);

}  // namespace qpu::compiler

#endif
