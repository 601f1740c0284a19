// Assigns spill slots. Vectors can share a slot if their live ranges in memory do not overlap. The
// slots are the colours of an interference graph. Reference: Gregory J. Chaitin, "Register
// Allocation and Spilling via Graph Coloring", 1982.
#ifndef QPU_SRC_COMPILER_SPILL_SLOTS_HPP
#define QPU_SRC_COMPILER_SPILL_SLOTS_HPP

#include <cstdint>
#include <vector>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// An access to a spilled vector in memory. Spill code is not reordered, so a slot is not
// overwritten before its last reload.
struct SlotAccess {
  Vreg vector = 0;
  std::uint32_t block = 0;
  std::uint32_t position = 0;  // position of the operation that loads the slot's offset
  bool isStore = false;        // false for a reload
};

// Returns the slot of each access, a number from 0 to `slots` - 1. The accesses must be sorted by
// block and, within a block, by order of execution.
std::vector<std::uint32_t> colourSlots(const Function& function,
                                      const std::vector<SlotAccess>& accesses,
                                      std::uint32_t& slots);

}  // namespace qpu::compiler

#endif
