// Copy coalescing on machine operations. Reference: Gregory J. Chaitin et al., "Register Allocation
// via Coloring", 1981. Overlapping live ranges may be coalesced if they hold the same value.
// Reference: Benoit Boissinot et al., "Revisiting Out-of-SSA Translation for Correctness, Code
// Quality, and Efficiency", 2009.
#ifndef QPU_SRC_COMPILER_COALESCE_HPP
#define QPU_SRC_COMPILER_COALESCE_HPP

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Assigns one register to the source and the target of a move if their live ranges do not
// interfere. Then removes unused moves, blocks and register numbers.
//
// A register that is written in several blocks must be the result of phi elimination. Every block
// at whose start such a register is live must begin with a move from the register. All other
// registers must be in SSA form.
void coalesceCopies(Function& function);

// Calls f(Operand&) for each source operand of o that is a register. If o updates only some
// elements of its target, o also reads the target, but f is not called for the target.
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
