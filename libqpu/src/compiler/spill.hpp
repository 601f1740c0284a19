// Fewer vectors alive at once. Those that find no register are computed again
// where that is possible; else they go to memory and come back through the VPM.
// Works on machine operations, before they are scheduled.
#ifndef QPU_SRC_COMPILER_SPILL_HPP
#define QPU_SRC_COMPILER_SPILL_HPP

#include <cstdint>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Marks DMA operations of spills in Operation::unit. Their memory is nobody
// else's, so requests of the TMUs need not keep their order against them.
constexpr std::uint8_t kSpillUnit = 1;

// The most vectors that are alive at once in the order of the operations.
std::uint32_t pressure(const Function& function);

// Spills until at most `limit` vectors are alive anywhere. False when that is not
// possible; without `memory` vectors can only be computed again. `bytes` is the
// memory that each QPU needs for it.
bool spill(Function& function, std::uint32_t limit, bool memory, std::uint32_t& bytes);

}  // namespace qpu::compiler

#endif
