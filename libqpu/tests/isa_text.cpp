// Tests the disassembly of instruction words and the assembly of the resulting text.
#include <doctest/doctest.h>

#include <array>
#include <map>
#include <random>
#include <stdexcept>
#include <string>

#include "isa/text.hpp"
#include "tests/isa_reference.hpp"

using namespace isa_build;
using qpu::isa::assemble;
using qpu::isa::disassemble;
using qpu::isa::decode;
using qpu::isa::encode;
using qpu::isa::Fields;
using qpu::isa::Word;

namespace {

std::string complaint(const std::string& line) {
  try {
    const Word word = assemble(line);
    return "no complaint: " + disassemble(word);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
}

bool isRaw(const std::string& line) { return line.rfind(".word", 0) == 0; }

// Returns an instruction of a random form in which all fields are random. Not all combinations
// are meaningful.
Instruction anyFields(std::mt19937_64& random) {
  const auto upTo = [&](std::uint64_t n) { return random() % n; };
  const auto number = [&](std::uint64_t n) { return static_cast<std::uint8_t>(upTo(n)); };
  const auto address = [&] { return number(3) == 0 ? number(64) : byte(39); };
  static constexpr std::array<Form, 8> kForms{
      Form::Alu,    Form::Alu,           Form::Alu,
      Form::Branch, Form::LoadImmediate, Form::LoadPerElementSigned,
      Form::Semaphore, Form::LoadPerElementUnsigned};
  Instruction i;
  i.form = kForms[upTo(8)];
  i.swap = upTo(2) != 0;
  i.waddrAdd = upTo(2) != 0 ? number(64) : byte(39);
  i.waddrMul = address();
  i.immediate = static_cast<std::uint32_t>(upTo(2) != 0 ? random() : upTo(64));
  if (i.form == Form::Branch) {
    static constexpr std::array<int, 13> kConds{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15};
    i.branchCond = static_cast<BranchCond>(kConds[upTo(13)]);
    i.branchRelative = upTo(2) != 0;
    i.branchRegister = upTo(2) != 0;
    if (i.branchRegister) i.branchRegisterA = number(32);
    return i;
  }
  i.condAdd = static_cast<Cond>(upTo(2) != 0 ? 1 : upTo(8));
  i.condMul = static_cast<Cond>(upTo(2) != 0 ? 1 : upTo(8));
  i.setFlags = upTo(4) == 0;
  if (upTo(3) == 0) i.pack = number(16);
  i.pm = upTo(4) == 0;
  if (i.form != Form::Alu) return i;
  i.immediate = 0;
  do {
    i.signal = static_cast<Signal>(upTo(2) != 0 ? 1 : upTo(14));
  } while (i.signal == Signal::LoadImmediate || i.signal == Signal::Branch);
  if (upTo(3) == 0) i.unpack = number(8);
  static constexpr std::array<int, 24> kOps{0,  1,  2,  3,  4,  5,  6,  7,  8,  12, 13, 14,
                                 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 30, 31};
  i.opAdd = static_cast<AddOp>(kOps[upTo(24)]);
  i.opMul = static_cast<MulOp>(upTo(2) != 0 ? 0 : upTo(8));
  i.raddrA = address();
  i.raddrB = address();
  i.addA = static_cast<Mux>(upTo(8));
  i.addB = upTo(2) != 0 ? i.addA : static_cast<Mux>(upTo(8));
  i.mulA = static_cast<Mux>(upTo(8));
  i.mulB = upTo(2) != 0 ? i.mulA : static_cast<Mux>(upTo(8));
  if (i.opAdd == AddOp::Nop) {
    i.addA = i.addB = Mux::R0;
    i.condAdd = Cond::Never;
    i.waddrAdd = 39;
  }
  if (i.opMul == MulOp::Nop) {
    i.mulA = i.mulB = Mux::R0;
    i.condMul = Cond::Never;
    i.waddrMul = 39;
  }
  return i;
}

}  // namespace

TEST_CASE("reference words have readable text that assembles") {
  const std::vector<Reference> all = references();
  for (const Reference& r : all) {
    INFO(r.name);
    const std::string line = disassemble(r.word);
    CHECK_FALSE(isRaw(line));
    CHECK(assemble(line) == r.word);
  }
}

TEST_CASE("listings have the documented format") {
  const std::map<Word, std::string> lines{
      {0x100009e7009e7000, "nop"},
      {0x100228e70d147dc0, "sub.sf r3, ra5, rb7"},
      {0x100049c2200c4037, "nop; fmul rb2, ra3, rb4"},
      {0x10024821219e7293, "fadd r0, r1, r2; fmul r1, r2, r3"},
      {0xd00208271498fdc0, "and r0, element_number, 15"},
      {0x100212a715827d80, "mov rb10, uniform"},
      {0x10020867070a7d80, "ftoi r1, ra2"},
      {0xd0020827019e13c0, "fadd r0, r1, 2.0"},
      {0xd00208270d9d03c0, "sub r0, r1, -16"},
      {0xd00049e1809ff000, "nop; mov.rot15 r1, r0"},
      {0xd00049e1809f0000, "nop; mov.rotr5 r1, r0"},
      {0x10020967159e7000, "mov r5_quad, r0"},
      {0x10021967159e7000, "mov r5_all, r0"},
      {0xf00809e7ffffffc0, "brr.allzs -64"},
      {0xf0b80267ffffffa0, "brr.anycc -96; link ra9"},
      {0xf0f489e700000000, "bra ra4, 0x0"},
      {0x10040827159e7240, "mov.zs r0, r1"},
      {0xe002082712345678, "ldi r0, 0x12345678"},
      {0xe2020827ccccaaaa, "ldis r0, [0,1,-2,-1,0,1,-2,-1,0,1,-2,-1,0,1,-2,-1]"},
      {0xe6020827ccccaaaa, "ldiu r0, [0,1,2,3,0,1,2,3,0,1,2,3,0,1,2,3]"},
      {0xe80009e700000013, "sacq 3"},
      {0xe80009e700000003, "srel 3"},
      {0x10020e27159e7000, "mov tmu0_s, r0"},
      {0xa00009e7009e7000, "nop; ldtmu0"},
      {0x10d20067159e7000, "mov ra1.8bs, r0"},
      {0x1402082701067c40, "fadd r0, ra1.16b, r1"},
      {0x10021c67159e7000, "mov vpm_wr_setup, r0"},
      {0x100009e7009f2000, "nop; read vpm_st_wait"},
      {0x300009e7009e7000, "nop; thrend"},
      {encode(swapped(move(toR(0), r(1)))), "mov r0, r1; ws"},
      {encode(move(toR(0), rb(address::kUniform))), "mov r0, uniform.b"},
      {encode(flags(mul(MulOp::FMul, toA(1), r(1), r(2), Cond::CClear))),
       "nop; fmul.cc.sf ra1, r1, r2"},
      {0xffffffffffffffff, ".word 0xffffffffffffffff"},
      {0x10000000090e7000, ".word 0x10000000090e7000"},
  };
  for (const auto& [word, line] : lines) {
    CHECK(disassemble(word) == line);
    CHECK(assemble(line) == word);
  }
}

TEST_CASE("fields without effect are listed on request") {
  struct Case {
    Word word;
    std::string line, with;
  };
  const std::vector<Case> cases{
      {0, "nop; bkpt",
       "nop; bkpt; with waddr_add=0, waddr_mul=0, raddr_a=0, raddr_b=0"},
      // One pipe has no operation, but it has a condition and sources.
      {0x10024821219e7293 & ~(Word{7} << 29U), "fadd r0, r1, r2",
       "fadd r0, r1, r2; with cond_mul=1, waddr_mul=33, mul_a=2, mul_b=3"},
      // A read port has an address that no ALU uses. If the address belonged to a
      // peripheral, the peripheral would still be read.
      {0x100009e7000c3000, "nop", "nop; with raddr_a=3, raddr_b=3"},
      {0x100009e700c83000, "nop; read vpm_ld_wait", "nop; read vpm_ld_wait; with raddr_b=3"},
      // The instructions have unpack or pack modes, but no value is read or written with these
      // modes.
      {0x1e0208270c9e7280, "add r0, r1, r2", "add r0, r1, r2; with unpack=7"},
      {0xf00819e7ffffffc0, "brr.allzs -64; ws", "brr.allzs -64; ws"},
      {0xf00869e7ffffffc0, "brr.allzs -64", "brr.allzs -64; with raddr_a=3"},
      // The first instruction has a small immediate that is not used. The second instruction has
      // the code of a rotation but no MUL operation.
      {0xd00208270c9e5280, "add r0, r1, r2", "add r0, r1, r2; with sig=13, raddr_b=37"},
      {0xd00208270c9f03c0, "add r0, r1, -16", "add r0, r1, -16; with raddr_b=48"},
  };
  for (const Case& c : cases) {
    INFO(c.line);
    CHECK(disassemble(c.word) == c.line);
    CHECK(disassemble(c.word, Fields::All) == c.with);
    CHECK(assemble(c.with) == c.word);
    CHECK(disassemble(assemble(c.line)) == c.line);
  }
  // If a semaphore instruction writes a register, the listing always shows this.
  const Word writes = 0xe802082700000113;
  CHECK(disassemble(writes) == "sacq 3; with cond_add=1, waddr_add=32, imm=275");
  CHECK(assemble(disassemble(writes)) == writes);
}

TEST_CASE("every word survives disassembly with all fields") {
  std::mt19937_64 random(5);
  int valid = 0;
  for (int n = 0; n < 600000; ++n) {
    // The word consists of random bits or of random field values. Random field values form a valid
    // instruction more often.
    Word word = n % 3 == 0 ? random() : encode(anyFields(random));
    // These words are branches and loads of immediates with random fields. Their reserved bits
    // are 0.
    if (n % 6 == 3) word = (word & 0x00ffffffffffffffU) | 0xf000000000000000U;
    const std::string line = disassemble(word, Fields::All);
    if (assemble(line) != word) FAIL_CHECK(line, " of ", word);
    const std::string brief = disassemble(word);
    if (disassemble(assemble(brief)) != brief) FAIL_CHECK(brief, " of ", word);
    // The text has the form .word only if the word is not a valid instruction.
    if (isRaw(brief) == decode(word).has_value()) FAIL_CHECK(brief, " of ", word);
    if (!isRaw(brief)) ++valid;
  }
  CHECK(valid > 500000);
}

TEST_CASE("whitespace does not affect the assembled word") {
  CHECK(assemble("  fadd   r0 ,r1,  r2;fmul r1 , r2,r3  ") == 0x10024821219e7293);
  CHECK(assemble("fmul rb2, ra3, rb4") == 0x100049c2200c4037);
  CHECK(assemble("ldi r0, 305419896") == 0xe002082712345678);
  CHECK(assemble("ldi rb3, -1") == 0xe00210e7ffffffff);
  CHECK(assemble("brr.allzs 0xffffffc0") == 0xf00809e7ffffffc0);
  CHECK(assemble(".word 18446744073709551615") == ~Word{0});
  CHECK(assemble("nop; nop; ldtmu0") == 0xa00009e7009e7000);
}

TEST_CASE("assembler errors name the column and the expectation") {
  const std::map<std::string, std::string> complaints{
      {"", "column 1: expected an operation, found the end of the line"},
      {"frob r0, r1", "column 1: expected an operation, found 'frob'"},
      {"fadd r0, r1", "column 12: expected ',', found the end of the line"},
      {"fadd r9, r1, r2", "column 6: expected a register to write, found 'r9'"},
      {"fadd r4, r1, r2", "column 6: expected a register to write, found 'r4'"},
      {"fadd r0, r1, r6", "column 14: expected a register to read, found 'r6'"},
      {"fadd r0, ra32, r1", "column 10: expected a register to read, found 'ra32'"},
      {"fadd r0, ra01, r1", "column 10: expected a register to read, found 'ra01'"},
      {"fadd r0, ra1, ra2", "column 15: expected only one address of file A, found 'ra2'"},
      {"fadd r0, rb1, rb2", "column 15: expected only one address of file B, found 'rb2'"},
      {"fadd ra1, r0, r0; fmul ra2, r0, r0",
       "column 24: expected the two results in different files, found 'ra2'"},
      {"fadd.zs.zc r0, r1, r2",
       "column 9: expected a condition, sf or rot, each once, found 'zc'"},
      {"fadd.rot3 r0, r1, r2",
       "column 11: expected the rotation on the MUL operation, found 'r0'"},
      {"nop; mov.rot16 r0, r1", "column 10: expected rot1..rot15 or rotr5, found 'rot16'"},
      {"add r0, r1, 16", "column 13: expected a small immediate, found '16'"},
      {"add r0, r1, -17", "column 13: expected a small immediate, found '-17'"},
      {"fadd r0, r1, 3.0", "column 14: expected a small immediate, found '3.0'"},
      {"add r0, 1, 2", "column 12: expected only one small immediate, found '2'"},
      {"add r0, rb1, 2",
       "column 15: expected no read of file B next to a small immediate or rotation, found the end "
       "of the line"},
      {"add r0, r1, 2; ldtmu0",
       "column 22: expected no signal next to a small immediate or rotation, found the end of the "
       "line"},
      {"add r0, r1, 2; mov.rot3 r1, r2",
       "column 31: expected -13 as the immediate of this rotation, found the end of the line"},
      {"nop; ldtmu0; ldtmu1", "column 14: expected only one signal, found 'ldtmu1'"},
      {"ldtmu0", "column 1: expected an operation, such as nop, first, found 'ldtmu0'"},
      {"ldi r0, 1; ldtmu0",
       "column 12: expected no signal next to a load of an immediate, found 'ldtmu0'"},
      {"ldi r0, 1; ldi rb1, 2", "column 21: expected the same value in both pipes, found '2'"},
      {"ldi r0, 4294967296", "column 9: expected a smaller number, found '4294967296'"},
      {"ldi r0, -2147483649", "column 9: expected a larger number, found '-2147483649'"},
      {"ldi r0, 0x", "column 9: expected a number, found '0x'"},
      {"ldiu r0, [0,4]", "column 13: expected 0..3, found '4'"},
      {"ldis r0, [0,2]", "column 13: expected -2..1, found '2'"},
      {"ldiu r0, [0]", "column 12: expected ',', found ']'"},
      {"add r0, r1, r2; ldi rb1, 2",
       "column 17: expected an operation of the same kind as that of the ADD pipe, found 'ldi'"},
      {"sacq 16", "column 6: expected a semaphore 0..15, found '16'"},
      {"brr.frob 0", "column 5: expected a branch condition, found 'frob'"},
      {"bra rb1, 0", "column 5: expected ra0..ra31 or a number of bytes, found 'rb1'"},
      {"brr 0; fmul r0, r1, r2", "column 8: expected no other operation next to a branch, found 'fmul'"},
      {"fadd r0, r1.16a, r2", "column 13: expected a valid unpack, found '16a'"},
      {"fadd r0, ra1.16a, ra1",
       "column 19: expected the same unpack for all reads of the register, found 'ra1'"},
      {"fadd r0, ra1.16a, r4.16a",
       "column 22: expected packs and unpacks of one kind, found '16a'"},
      {"mov ra1.9z, r0", "column 9: expected a valid pack, found '9z'"},
      {"mov rb1.8a, r0", "column 9: expected the two results in different files, found '8a'"},
      {"fadd r0, r1, r2; fmul.sf r1, r2, r3",
       "column 18: expected sf on the operation that sets the flags, found 'fmul.sf'"},
      {"nop.sf; fmul r1, r2, r3",
       "column 1: expected sf on the operation that sets the flags, found 'nop.sf'"},
      {"fadd r0, ra1, r2; read ra2", "column 24: expected only one address of file A, found 'ra2'"},
      {"fadd r0, r1, r2 r3", "column 17: expected ';' or the end of the line, found 'r3'"},
      {"nop; with frob=1", "column 11: expected a field of this instruction, found 'frob'"},
      {"nop; with imm=1", "column 11: expected a field of this instruction, found 'imm'"},
      {"nop; with raddr_a 1", "column 19: expected '=', found '1'"},
      {"nop; with raddr_a=64", "column 19: expected 0..63, found '64'"},
      {"nop; with sig=15", "column 15: expected 0..13, found '15'"},
      {"nop; with sf=1,",
       "column 16: expected a field of this instruction, found the end of the line"},
      {".word 0x1 2", "column 11: expected the end of the line, found '2'"},
      {".byte 1", "column 1: expected .word, found '.byte'"},
  };
  for (const auto& entry : complaints) {
    INFO(entry.first);
    CHECK(complaint(entry.first) == entry.second);
  }
}

TEST_CASE("assembling any text succeeds or throws an error") {
  static constexpr std::array<const char*, 37> kPieces{
      "fadd", "mov",  "ldi",  "ldiu", "brr", "bra",  "sacq",  "nop", " ",   " ",   ", ",
      "; ",   "ra1",  "rb31", "r4",   "r0",  ".sf",  ".zs",   ".8a", ".b",  "-",   "0x",
      "12",   "1.0",  "[",    "]",    "[0",  "link", "read",  "ws",  "vpm", "\xff", "ldtmu0",
      ".rot1", ".word", "uniform", "99999999999999999999"};
  std::mt19937_64 random(9);
  int assembled = 0;
  for (int n = 0; n < 100000; ++n) {
    std::string line;
    for (std::uint64_t p = random() % 10; p > 0; --p) line += kPieces[random() % kPieces.size()];
    try {
      const Word word = assemble(line);
      ++assembled;
      if (assemble(disassemble(word, Fields::All)) != word) FAIL_CHECK(line);
    } catch (const std::invalid_argument& e) {
      if (std::string(e.what()).rfind("column ", 0) != 0) FAIL_CHECK(e.what());
    }
  }
  CHECK(assembled > 100);
}
