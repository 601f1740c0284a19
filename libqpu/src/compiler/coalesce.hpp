// Passes over machine operations.
#ifndef QPU_SRC_COMPILER_COALESCE_HPP
#define QPU_SRC_COMPILER_COALESCE_HPP

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Gives source and target of moves one register where their lives allow it,
// then drops moves, blocks and register numbers that nothing needs.
//
// Registers that are written in several blocks must be live only into blocks at
// whose start a move reads them, as phis are expressed; others as in static
// single assignment.
void coalesceCopies(Function& function);

// Calls f(Operand&) for each register that o reads, but not for a target that
// keeps elements.
template <typename O, typename F>
void forRegisters(O& o, F f) {
  if (o.a.isRegister()) f(o.a);
  if (o.b.isRegister()) f(o.b);
}

inline bool keepsElements(const Operation& o) {
  return o.target != Operation::kNone && o.cond != isa::Cond::Always;
}

}  // namespace qpu::compiler

#endif
