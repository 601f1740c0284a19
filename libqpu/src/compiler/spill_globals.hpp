// Decides which of the vectors that are live across blocks are not assigned a register.
#ifndef QPU_SRC_COMPILER_SPILL_GLOBALS_HPP
#define QPU_SRC_COMPILER_SPILL_GLOBALS_HPP

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/liveness.hpp"
#include "compiler/rematerialise.hpp"

namespace qpu::compiler {

// The number of registers for the base address and the VPM row of spill code. Both values are live
// throughout the function.
constexpr std::uint32_t kSpillRegisters = 2;

// Returns one entry per register, which is nonzero if the vector is spilled or rematerialised
// between blocks. Returns std::nullopt if the other vectors do not fit into `limit` registers. If
// `memory` is false, chooses only vectors that can be rematerialised.
std::optional<std::vector<char>> chooseSpilledGlobals(const Function& function, const Liveness& live,
                                                      const std::vector<Rematerialisation>& rematerialisations,
                                                      std::uint32_t limit, bool memory);

}  // namespace qpu::compiler

#endif
