// Requests of the TMUs that are in flight between blocks.
#ifndef QPU_SRC_COMPILER_TMU_REQUESTS_HPP
#define QPU_SRC_COMPILER_TMU_REQUESTS_HPP

#include <array>
#include <cstdint>
#include <vector>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// The fewest and the most requests in flight on any path to each block, by TMU.
struct RequestsInFlight {
  std::vector<std::array<std::uint32_t, 2>> fewest, most;
};

// A forward data-flow analysis: Gary A. Kildall, "A Unified Approach to Global Program Optimization", 1973.
RequestsInFlight findRequestsInFlight(const Function& function);

}  // namespace qpu::compiler

#endif
