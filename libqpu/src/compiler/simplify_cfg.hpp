// Simplification of the control-flow graph, a subset of LLVM's pass of the same name.
#ifndef QPU_SRC_COMPILER_SIMPLIFY_CFG_HPP
#define QPU_SRC_COMPILER_SIMPLIFY_CFG_HPP

#include "compiler/mir.hpp"

namespace qpu::compiler {

// Replaces branches that have one target with jumps, threads jumps through empty blocks and removes unreachable blocks.
void simplifyCfg(Function& function);

}  // namespace qpu::compiler

#endif
