// Coalescing of recurrences such as sum = sum + x. In SSA form, the old sum and the new sum have
// separate registers.
#ifndef QPU_SRC_COMPILER_COALESCE_RECURRENCES_HPP
#define QPU_SRC_COMPILER_COALESCE_RECURRENCES_HPP

#include "compiler/mir.hpp"

namespace qpu::compiler {

// If an operation is the last use of an operand, puts the operation's result into the operand's
// register. The pass does so only if the register is live across blocks and is not written again
// before the result's last use. Without this pass, a loop-carried recurrence needs two registers:
// one for the current value, and one that is reserved for the value at the end of the iteration.
void coalesceRecurrences(Function& function);

}  // namespace qpu::compiler

#endif
