// Spilling: reduces register pressure before scheduling. A vector without a register is
// rematerialised if possible; otherwise it is stored to memory and reloaded.
//
// Within a block the vector whose next use is farthest away is evicted: Laszlo A. Belady, "A Study of Replacement
// Algorithms for a Virtual-Storage Computer", 1966, applied to registers as in Matthias Braun and Sebastian Hack,
// "Register Spilling and Live-Range Splitting for SSA-Form Programs", 2009.
#ifndef QPU_SRC_COMPILER_SPILL_HPP
#define QPU_SRC_COMPILER_SPILL_HPP

#include <cstdint>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Marks the DMA operations of spills in Operation::unit. Only they access the spill area, so they
// need not be ordered with respect to TMU requests.
constexpr std::uint8_t kSpillUnit = 1;

// Spills until at most `limit` vectors are live at any point. Returns false if that is
// impossible. Without `memory`, vectors can only be rematerialised. `bytes` is the size of the
// spill area that each QPU needs.
bool spill(Function& function, std::uint32_t limit, bool memory, std::uint32_t& bytes);

}  // namespace qpu::compiler

#endif
