// A readable form of machine operations, and a check of their rules.
#ifndef QPU_SRC_COMPILER_MIR_TEXT_HPP
#define QPU_SRC_COMPILER_MIR_TEXT_HPP

#include <string>

#include "compiler/mir.hpp"

namespace qpu::compiler {

std::string text(const Operation& operation);
std::string text(const Function& function);

// The first rule of mir.hpp that the function breaks, with the operation; empty
// for a sound one.
std::string check(const Function& function);

}  // namespace qpu::compiler

#endif
