// The text form of machine operations, and a verifier for the rules in mir.hpp.
#ifndef QPU_SRC_COMPILER_MIR_TEXT_HPP
#define QPU_SRC_COMPILER_MIR_TEXT_HPP

#include <string>

#include "compiler/mir.hpp"

namespace qpu::compiler {

std::string text(const Operation& operation);
std::string text(const Function& function);

// Returns a message about the first operation that violates a rule in mir.hpp, or an empty string
// if the function is valid.
std::string check(const Function& function);

}  // namespace qpu::compiler

#endif
