// Coalescing of recurrences, such as sum = sum + x. In SSA form, each sum has a separate
// register.
#ifndef QPU_SRC_COMPILER_COALESCE_RECURRENCES_HPP
#define QPU_SRC_COMPILER_COALESCE_RECURRENCES_HPP

#include "compiler/mir.hpp"

namespace qpu::compiler {

// If an operation is the last use of one of its operands, puts the result into that operand's
// register, provided that the register is live across blocks and is not written before the
// result's last use. Otherwise a loop-carried
// recurrence needs two registers: one for the current value, and one that is reserved for the
// value at the end of the iteration.
void coalesceRecurrences(Function& function);

}  // namespace qpu::compiler

#endif
