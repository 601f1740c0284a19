// Finds the points where spill code cannot be inserted because it would disturb VPM setups.
#ifndef QPU_SRC_COMPILER_SPILL_BARRIERS_HPP
#define QPU_SRC_COMPILER_SPILL_BARRIERS_HPP

#include <cstddef>
#include <vector>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Entry i states whether storing, or reloading, before operation i is forbidden.
struct SpillBarriers {
  std::vector<char> noStore;
  std::vector<char> noReload;
};

// `ready`: the number of operations at the start after which the address and the row for spill code
// are available.
SpillBarriers findSpillBarriers(const std::vector<Operation>& operations, std::size_t ready);

}  // namespace qpu::compiler

#endif
