// The static verifier checks all paths through a program against the hardware's rules, which are
// those in the manual's section on hazards and further known rules. The verifier does not depend on
// the compiler.
//
// Rules for timing, registers and DMA must hold on every path. For counts (of TMU requests and VPM
// reads), the verifier tracks the set of possible values. The verifier reports an error only if no
// value in the set is allowed. Other errors depend on data, or on setup words and addresses that
// are not constants. The emulator reports these errors when they occur.
#ifndef QPU_SRC_ISA_VERIFY_HPP
#define QPU_SRC_ISA_VERIFY_HPP

#include <cstddef>
#include <string>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::isa {

struct Fault {
  std::size_t instruction = 0;  // the instruction that violates the rule
  // The earlier instruction that the rule refers to, or `instruction` itself.
  std::size_t cause = 0;
  const char* rule = "";        // short name, such as "register-file-latency"
  std::string text;             // contains both instructions and the text of the rule
};

// Returns the faults, sorted by instruction, or an empty list if the program is valid. Branches
// must be relative, and their targets must be instructions of the program.
std::vector<Fault> verify(const std::vector<Word>& program);

struct Rule {
  const char* name;
  const char* text;
};

// Returns all rules that verify() checks.
const std::vector<Rule>& rules();

}  // namespace qpu::isa

#endif
