// Text form of machine operations, and a verifier of their rules.
#ifndef QPU_SRC_COMPILER_MIR_TEXT_HPP
#define QPU_SRC_COMPILER_MIR_TEXT_HPP

#include <string>

#include "compiler/mir.hpp"

namespace qpu::compiler {

std::string text(const Operation& operation);
std::string text(const Function& function);

// The first violation of the rules in mir.hpp, with its operation. Empty if the function is valid.
std::string check(const Function& function);

}  // namespace qpu::compiler

#endif
