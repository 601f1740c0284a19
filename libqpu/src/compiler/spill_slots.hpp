// Which spilled vectors share memory: those of which never two are wanted at once.
#ifndef QPU_SRC_COMPILER_SPILL_SLOTS_HPP
#define QPU_SRC_COMPILER_SPILL_SLOTS_HPP

#include <cstdint>
#include <vector>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// An access to the memory of a spilled vector. Spills keep their order among each
// other, so the next tenant of a slot comes only when the last has been read.
struct SlotAccess {
  Vreg vector = 0;
  std::uint32_t block = 0;
  std::uint32_t position = 0;  // of the operation that makes the slot's offset
  bool isStore = false;        // of the whole vector; else a reload
};

// Slots numbered from 0 on, one for each access; `slots` is their number. The
// accesses are in the order of blocks and, within one, of execution.
std::vector<std::uint32_t> colourSlots(const Function& function,
                                      const std::vector<SlotAccess>& accesses,
                                      std::uint32_t& slots);

}  // namespace qpu::compiler

#endif
