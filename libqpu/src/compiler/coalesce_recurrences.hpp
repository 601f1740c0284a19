// Running values: sum = sum + x in SSA form has a register for each sum.
#ifndef QPU_SRC_COMPILER_COALESCE_RECURRENCES_HPP
#define QPU_SRC_COMPILER_COALESCE_RECURRENCES_HPP

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Lets a result take the register of an operand that dies there, when that
// register lives across blocks and is written again only after the result's last
// use. Without it every step of a running value that a loop carries needs a
// register beside the one that waits for the last step.
void coalesceRecurrences(Function& function);

}  // namespace qpu::compiler

#endif
