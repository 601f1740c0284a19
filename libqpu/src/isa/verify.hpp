// Checks programs against the rules of the hardware without running them: every
// path through the program, every rule of the manual's section on hazards and
// what is known beyond it. Independent of the compiler.
//
// Timing rules, registers and DMA hold on every path. Counts (TMU requests, VPM
// reads) are followed as the set of values that some path may have led to, and
// reported where no value of the set is allowed: what depends on data is found
// by the emulator when it happens. So are setup words and addresses that are
// not constants of the program.
#ifndef QPU_SRC_ISA_VERIFY_HPP
#define QPU_SRC_ISA_VERIFY_HPP

#include <cstddef>
#include <string>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::isa {

struct Fault {
  std::size_t instruction = 0;  // where the rule is broken
  std::size_t cause = 0;        // the earlier instruction that set it up; else the same
  const char* rule = "";        // short name of the rule, such as "register-file-latency"
  std::string text;             // both instructions as listed, the rule in words
};

// Faults in order of instructions; none for a program that may run. Branch
// targets must be relative to labels of the program itself.
std::vector<Fault> verify(const std::vector<Word>& program);

struct Rule {
  const char* name;
  const char* text;
};

// All that verify() may report.
const std::vector<Rule>& rules();

}  // namespace qpu::isa

#endif
