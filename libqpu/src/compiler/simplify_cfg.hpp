// Simplification of the control-flow graph: a subset of LLVM's SimplifyCFG pass.
#ifndef QPU_SRC_COMPILER_SIMPLIFY_CFG_HPP
#define QPU_SRC_COMPILER_SIMPLIFY_CFG_HPP

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Replaces a branch with a jump if both targets of the branch are the same block. Also threads
// jumps through empty blocks, and removes unreachable blocks.
void simplifyCfg(Function& function);

}  // namespace qpu::compiler

#endif
