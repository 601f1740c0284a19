// Rematerialisation: which vectors can be recomputed where they are used, instead of staying in a
// register or in memory. Preston Briggs, Keith D. Cooper and Linda Torczon, "Rematerialization",
// 1992.
#ifndef QPU_SRC_COMPILER_REMATERIALISE_HPP
#define QPU_SRC_COMPILER_REMATERIALISE_HPP

#include <cstdint>
#include <vector>

#include "compiler/liveness.hpp"
#include "compiler/mir.hpp"

namespace qpu::compiler {

struct Rematerialisation {
  std::uint32_t operations = 0;  // operations needed, including those for rematerialised operands; 0 if impossible
  Operation definition;
  std::vector<Vreg> sources;  // source vectors of the computation; each keeps its content as long as the vector is live
};

// Indexed by register.
std::vector<Rematerialisation> findRematerialisable(const Function& function, const Liveness& live);

}  // namespace qpu::compiler

#endif
