// Register pressure of machine operations: the maximum number of vectors that are live at once.
#ifndef QPU_SRC_COMPILER_REGISTER_PRESSURE_HPP
#define QPU_SRC_COMPILER_REGISTER_PRESSURE_HPP

#include <cstddef>
#include <cstdint>

#include "compiler/liveness.hpp"
#include "compiler/mir.hpp"

namespace qpu::compiler {

// The pressure in the order of the operations. Vectors that are live out of the block count
// throughout.
std::uint32_t pressure(const Function& function, const Liveness& live, std::size_t block);

// The highest pressure of all blocks.
std::uint32_t pressure(const Function& function);

}  // namespace qpu::compiler

#endif
