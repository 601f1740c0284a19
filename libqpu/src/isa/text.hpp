// The disassembler and the assembler.
#ifndef QPU_SRC_ISA_TEXT_HPP
#define QPU_SRC_ISA_TEXT_HPP

#include <string>
#include <string_view>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::isa {

// Converts an instruction to a line of text, without its address. The parts of the line are
// separated by "; ":
//
//   fadd.zs.sf ra1, r4, rb2; fmul r0, r1, ra3.16a; ldtmu0
//
// The first part is the operation of the ADD pipe, or nop. The following parts are optional: the
// operation of the MUL pipe, reads whose values no ALU uses ("read vpm_st_wait"), and the signal.
// The mnemonic mov stands for `or x, x` and `v8min x, x`.
//
// An operation can have these suffixes: a condition (zs, zc, ns, nc, cs, cc or never; the default
// is always), sf to set flags, and rot1..rot15 or rotr5 to rotate the MUL result. A register can
// have these suffixes: the pack of a result, the unpack of a source, and ".b" if an address that
// both files have is read through file B. A number is a small immediate. The names usually show to
// which file each result goes. If the names do not show the files, "ws" means that the files are
// exchanged.
//
// Examples of the other instruction forms, with the mnemonics of their variants:
//
//   ldi r0, 0x3f800000          load; per element: ldis or ldiu r0, [0,1,...]
//   brr.anyzc -64; link ra9     branch by bytes, from the end of the delay slots; absolute: bra
//   sacq 3                      acquire a semaphore; release: srel
//
// Unused fields of an instruction (such as the sources of a nop, or the address of a register
// that is not read) can have any value. assemble() sets them to default values. With Fields::All,
// the line lists the unused fields whose values differ from the defaults:
//
//   nop; fmul r0, r1, r2; with cond_add=1, raddr_a=3
//
// The text of a semaphore instruction always includes these fields, because they can make the
// instruction write registers. A word that decode() rejects is listed as ".word 0x...".
enum class Fields : std::uint8_t { Used, All };
std::string disassemble(Word word, Fields fields = Fields::Used);

// Assembles one line. For every word w, assemble(disassemble(w, Fields::All)) == w. Throws
// std::invalid_argument with a message that contains the column and the expected input.
Word assemble(std::string_view line);

}  // namespace qpu::isa

#endif
