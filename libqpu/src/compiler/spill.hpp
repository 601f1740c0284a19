// Spilling: reduces register pressure before scheduling. A vector for which there is no register is
// rematerialised if possible. Otherwise, the vector is stored to memory and reloaded.
//
// Within a block, the pass evicts the vector whose next use is farthest away. Reference: Laszlo A.
// Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", 1966. For registers,
// this technique is described in Matthias Braun and Sebastian Hack, "Register Spilling and
// Live-Range Splitting for SSA-Form Programs", 2009.
#ifndef QPU_SRC_COMPILER_SPILL_HPP
#define QPU_SRC_COMPILER_SPILL_HPP

#include <cstdint>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// The value of Operation::unit that marks the DMA operations of spill code. Only spill code
// accesses the spill area, so these operations need not be ordered with respect to TMU requests.
constexpr std::uint8_t kSpillUnit = 1;

// Spills vectors until at most `limit` vectors are live at any point. Returns false if that is
// impossible. If `memory` is false, vectors can only be rematerialised. Sets `bytes` to the size of
// the spill area that each QPU needs.
bool spill(Function& function, std::uint32_t limit, bool memory, std::uint32_t& bytes);

}  // namespace qpu::compiler

#endif
