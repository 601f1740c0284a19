// Listings of programs, and programs from listings.
#ifndef QPU_SRC_ISA_TEXT_HPP
#define QPU_SRC_ISA_TEXT_HPP

#include <string>
#include <string_view>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::isa {

// One line, without address: "fadd ra1, r4, r5; fmul r0, r1, rb2.ldtmu0". Words
// that decode() refuses are listed as ".word 0x...".
std::string disassemble(Word word);

// The word of one such line; assemble(disassemble(w)) == w for every w. Throws
// std::invalid_argument with the place and what was expected.
Word assemble(std::string_view line);

}  // namespace qpu::isa

#endif
