// Register pressure of machine operations: the maximum number of vectors that are live at the
// same time.
#ifndef QPU_SRC_COMPILER_REGISTER_PRESSURE_HPP
#define QPU_SRC_COMPILER_REGISTER_PRESSURE_HPP

#include <cstddef>
#include <cstdint>

#include "compiler/liveness.hpp"
#include "compiler/mir.hpp"

namespace qpu::compiler {

// Returns the register pressure of the block with its operations in their current order. A vector
// that is live at the end of the block is treated as live in the whole block.
std::uint32_t pressure(const Function& function, const Liveness& live, std::size_t block);

// Returns the highest register pressure of any block.
std::uint32_t pressure(const Function& function);

}  // namespace qpu::compiler

#endif
