// Rematerialisation: determines which vectors can be recomputed where they are used instead of
// being kept in a register or in memory. Reference: Preston Briggs, Keith D. Cooper and Linda
// Torczon, "Rematerialization", 1992.
#ifndef QPU_SRC_COMPILER_REMATERIALISE_HPP
#define QPU_SRC_COMPILER_REMATERIALISE_HPP

#include <cstdint>
#include <vector>

#include "compiler/liveness.hpp"
#include "compiler/mir.hpp"

namespace qpu::compiler {

struct Rematerialisation {
  // Number of operations that are needed, including the operations for rematerialised operands. 0
  // means that rematerialisation is impossible.
  std::uint32_t operations = 0;
  Operation definition;
  // The computation's source vectors. Each source keeps its content while the rematerialised vector
  // is live.
  std::vector<Vreg> sources;
};

// Returns one entry per register.
std::vector<Rematerialisation> findRematerialisable(const Function& function, const Liveness& live);

}  // namespace qpu::compiler

#endif
