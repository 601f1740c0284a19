// How vectors that find no register are computed again where they are used.
#ifndef QPU_SRC_COMPILER_REMATERIALISE_HPP
#define QPU_SRC_COMPILER_REMATERIALISE_HPP

#include <cstdint>
#include <vector>

#include "compiler/liveness.hpp"
#include "compiler/mir.hpp"

namespace qpu::compiler {

struct Rematerialisation {
  std::uint32_t steps = 0;  // operations that it takes, those of operands with rematerialisations included; 0: there is none
  Operation operation;
  std::vector<Vreg> leaves;  // the vectors that it starts from: each keeps its content as long as the vector is alive
};

// Of each register: vectors that are computed once, from what is there as long as they are.
std::vector<Rematerialisation> findRematerialisable(const Function& function, const Liveness& live);

}  // namespace qpu::compiler

#endif
