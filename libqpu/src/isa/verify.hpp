// Static verifier: checks all paths through a program against the hardware's rules, which are
// those in the manual's section on hazards and further known ones. The verifier does not depend
// on the compiler.
//
// Rules for timing, registers and DMA must hold on every path. For counts (TMU requests, VPM
// reads) the verifier tracks the set of possible values, and reports an error only if no value of
// the set is allowed. The emulator finds errors that depend on data when they occur, as well as
// errors in setup words and addresses that are not constants.
#ifndef QPU_SRC_ISA_VERIFY_HPP
#define QPU_SRC_ISA_VERIFY_HPP

#include <cstddef>
#include <string>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::isa {

struct Fault {
  std::size_t instruction = 0;  // the instruction that violates the rule
  std::size_t cause = 0;        // the earlier instruction that the rule refers to, or the same
  const char* rule = "";        // short name of the rule, such as "register-file-latency"
  std::string text;             // both instructions and the text of the rule
};

// Returns the faults in instruction order; empty if the program is valid. Branches must be
// relative and lead to instructions of the program.
std::vector<Fault> verify(const std::vector<Word>& program);

struct Rule {
  const char* name;
  const char* text;
};

// All rules that verify() checks.
const std::vector<Rule>& rules();

}  // namespace qpu::isa

#endif
