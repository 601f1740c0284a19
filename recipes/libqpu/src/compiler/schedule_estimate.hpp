// How long a scheduled block takes when it is run again and again, with what it waits for: results of the TMUs and the
// DMA. A guess for choosing between schedules; only their order counts.
#ifndef QPU_SRC_COMPILER_SCHEDULE_ESTIMATE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_ESTIMATE_HPP

#include <array>
#include <cstdint>

#include "compiler/schedule.hpp"

namespace qpu::compiler {

// Of one run, in instructions. `inFlight` are the requests of each TMU that are outstanding before the block.
double estimate(const ScheduledBlock& block, const std::array<std::uint32_t, 2>& inFlight);

}  // namespace qpu::compiler

#endif
