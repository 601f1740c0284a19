// Chooses which of the vectors that are live across blocks have no register.
#ifndef QPU_SRC_COMPILER_SPILL_GLOBALS_HPP
#define QPU_SRC_COMPILER_SPILL_GLOBALS_HPP

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/liveness.hpp"
#include "compiler/rematerialise.hpp"

namespace qpu::compiler {

// Registers for the base address and the VPM row of spills, both of which are live everywhere.
constexpr std::uint32_t kSpillRegisters = 2;

// Indexed by register: whether the vector is spilled or rematerialised between blocks. Returns
// nothing if the others do not fit into `limit` registers. Without `memory`, only vectors that
// can be rematerialised are chosen.
std::optional<std::vector<char>> chooseSpilledGlobals(const Function& function, const Liveness& live,
                                                      const std::vector<Rematerialisation>& rematerialisations,
                                                      std::uint32_t limit, bool memory);

}  // namespace qpu::compiler

#endif
