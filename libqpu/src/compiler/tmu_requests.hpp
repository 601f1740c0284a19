// TMU requests that are in flight at block boundaries.
#ifndef QPU_SRC_COMPILER_TMU_REQUESTS_HPP
#define QPU_SRC_COMPILER_TMU_REQUESTS_HPP

#include <array>
#include <cstdint>
#include <vector>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// The minimum and maximum number of requests that are in flight at the start of each block, over
// all paths. Each entry contains one number per TMU.
struct RequestsInFlight {
  std::vector<std::array<std::uint32_t, 2>> fewest, most;
};

// Computes the numbers of TMU requests in flight with a forward data-flow analysis. Reference: Gary
// A. Kildall, "A Unified Approach to Global Program Optimization", 1973.
RequestsInFlight findRequestsInFlight(const Function& function);

}  // namespace qpu::compiler

#endif
