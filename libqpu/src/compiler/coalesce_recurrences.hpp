// Coalescing of recurrences, such as sum = sum + x. In SSA form each sum has a register of its own.
#ifndef QPU_SRC_COMPILER_COALESCE_RECURRENCES_HPP
#define QPU_SRC_COMPILER_COALESCE_RECURRENCES_HPP

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Puts a result into the register of an operand that is used here for the last time, if that register is live across blocks and is not
// written before the last use of the result. Otherwise a recurrence that a loop carries needs two registers: one for
// the current value and one that is reserved for the value at the end of the iteration.
void coalesceRecurrences(Function& function);

}  // namespace qpu::compiler

#endif
