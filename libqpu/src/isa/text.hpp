// Disassembler and assembler.
#ifndef QPU_SRC_ISA_TEXT_HPP
#define QPU_SRC_ISA_TEXT_HPP

#include <string>
#include <string_view>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::isa {

// One instruction as a line of text, without its address. The parts are separated by "; ":
//
//   fadd.zs.sf ra1, r4, rb2; fmul r0, r1, ra3.16a; ldtmu0
//
// The first part is the operation of the ADD pipe, or nop. It is followed by the operation of the MUL pipe, if any, by
// reads whose value no ALU uses ("read vpm_st_wait"), and by the signal. mov stands for or x, x and v8min x, x.
//
// Suffixes of operations: a condition (zs zc ns nc cs cc never; none means always), sf to set flags, and rot1..rot15 or
// rotr5 to rotate the MUL result. Suffixes of registers: the pack of a result, the unpack of a source, and ".b" for
// addresses of both files that are read through file B. Numbers are small immediates. The names show to which file each
// result goes. If they do not, "ws" means that the files are exchanged.
//
//   ldi r0, 0x3f800000          load; per element: ldis or ldiu r0, [0,1,...]
//   brr.anyzc -64; link ra9     branch by bytes, from the end of the delay slots; absolute: bra
//   sacq 3                      acquire a semaphore; release: srel
//
// Unused fields of an instruction (the sources of a nop, the address of a register that is not read) can have any
// value. assemble() sets them to defaults. With Fields::All the line lists those that differ from the defaults:
//
//   nop; fmul r0, r1, r2; with cond_add=1, raddr_a=3
//
// For semaphores they are always listed, because they can make the instruction write registers. Words that decode()
// rejects are listed as ".word 0x...".
enum class Fields : std::uint8_t { Used, All };
std::string disassemble(Word word, Fields fields = Fields::Used);

// Assembles one line. assemble(disassemble(w, Fields::All)) == w for every w. Throws std::invalid_argument with the
// column and the expected input.
Word assemble(std::string_view line);

}  // namespace qpu::isa

#endif
