// Lowers a kernel's source to the intermediate representation. The source is structured, so SSA
// form is built in one pass. Reference: Marc M. Brandis and Hanspeter Moessenboeck, "Single-Pass
// Generation of Static Single-Assignment Form for Structured Languages", 1994.
#ifndef QPU_SRC_COMPILER_LOWER_HPP
#define QPU_SRC_COMPILER_LOWER_HPP

#include "compiler/compile.hpp"
#include "compiler/ir.hpp"
#include "lang/source.hpp"

namespace qpu::compiler {

// Throws CompileError if a QPU cannot run the kernel.
ir::Graph lower(const detail::Source& source, const Options& options);

}  // namespace qpu::compiler

#endif
