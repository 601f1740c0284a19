// Source to the middle form.
#ifndef QPU_SRC_COMPILER_LOWER_HPP
#define QPU_SRC_COMPILER_LOWER_HPP

#include "compiler/compile.hpp"
#include "compiler/ir.hpp"
#include "lang/source.hpp"

namespace qpu::compiler {

// Throws CompileError for what no QPU can run.
ir::Graph lower(const detail::Source& source, const Options& options);

}  // namespace qpu::compiler

#endif
