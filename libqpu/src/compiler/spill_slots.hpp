// Assigns spill slots. Vectors whose live ranges in memory do not overlap can share a slot. The slots are the colours
// of an interference graph: Gregory J. Chaitin, "Register Allocation and Spilling via Graph Coloring", 1982.
#ifndef QPU_SRC_COMPILER_SPILL_SLOTS_HPP
#define QPU_SRC_COMPILER_SPILL_SLOTS_HPP

#include <cstdint>
#include <vector>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// An access to the memory of a spilled vector. Spill code is not reordered, so a slot is not
// overwritten before its last reload.
struct SlotAccess {
  Vreg vector = 0;
  std::uint32_t block = 0;
  std::uint32_t position = 0;  // of the operation that loads the offset of the slot
  bool isStore = false;        // or a reload
};

// The slot of each access, from 0 to `slots` - 1. The accesses must be in the order of blocks and, within a block, in
// order of execution.
std::vector<std::uint32_t> colourSlots(const Function& function,
                                      const std::vector<SlotAccess>& accesses,
                                      std::uint32_t& slots);

}  // namespace qpu::compiler

#endif
