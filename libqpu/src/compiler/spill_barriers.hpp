// Finds the points at which spill code cannot be inserted because it would change VPM setups that
// are in use.
#ifndef QPU_SRC_COMPILER_SPILL_BARRIERS_HPP
#define QPU_SRC_COMPILER_SPILL_BARRIERS_HPP

#include <cstddef>
#include <vector>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Entry i is nonzero if no store (noStore) or no reload (noReload) may be inserted before
// operation i.
struct SpillBarriers {
  std::vector<char> noStore;
  std::vector<char> noReload;
};

// `ready` is the number of operations at the start of the block that compute the address and the
// row for spill code. No spill code may precede these operations.
SpillBarriers findSpillBarriers(const std::vector<Operation>& operations, std::size_t ready);

}  // namespace qpu::compiler

#endif
