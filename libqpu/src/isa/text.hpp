// Listings of programs, and programs from listings.
#ifndef QPU_SRC_ISA_TEXT_HPP
#define QPU_SRC_ISA_TEXT_HPP

#include <string>
#include <string_view>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::isa {

// One line, without address: parts with "; " between them.
//
//   fadd.zs.sf ra1, r4, rb2; fmul r0, r1, ra3.16a; ldtmu0
//
// First the ADD pipe, or nop; then the MUL pipe, if it works; then reads that no
// ALU takes ("read vpm_st_wait") and the signal. mov is or x, x and v8min x, x.
// Suffixes of operations: the condition (zs zc ns nc cs cc never; none: always),
// sf sets flags, rot1..rot15 and rotr5 rotate the MUL result. Suffixes of
// registers: packs of what is written, unpacks of what is read, ".b" for
// registers that both files have and that are read through file B. Numbers are
// small immediates. Which result goes to which file is in the names; where it is
// not, "ws" says that the two are exchanged.
//
//   ldi r0, 0x3f800000          ldis, ldiu r0, [0,1,...]: per element
//   brr.anyzc -64; link ra9     bytes after the delay slots; bra: absolute
//   sacq 3                      semaphore, srel to release
//
// Fields that do nothing in an instruction (the sources of a nop, the address of a
// register that is not read) may have any value. Assembled from its line, such a word
// has the values that assemble() gives those fields. With Fields::All the line says
// what they are, field by field:
//
//   nop; fmul r0, r1, r2; with cond_add=1, raddr_a=3
//
// A semaphore's always stand there, for they make it write registers. Words that
// decode() refuses are listed as ".word 0x...".
enum class Fields : std::uint8_t { Used, All };
std::string disassemble(Word word, Fields fields = Fields::Used);

// The word of one such line; assemble(disassemble(w, Fields::All)) == w for every w.
// Throws std::invalid_argument with the place and what was expected.
Word assemble(std::string_view line);

}  // namespace qpu::isa

#endif
