// Simplification of the control-flow graph: a subset of LLVM's SimplifyCFG pass.
#ifndef QPU_SRC_COMPILER_SIMPLIFY_CFG_HPP
#define QPU_SRC_COMPILER_SIMPLIFY_CFG_HPP

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Replaces each branch that is always taken, or whose two targets are the same block, with a jump,
// threads jumps through empty blocks, and removes unreachable blocks.
void simplifyCfg(Function& function);

}  // namespace qpu::compiler

#endif
