// Tests each rule of the verifier with a program that violates only this rule, and with the
// corrected program.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "isa/text.hpp"
#include "isa/verify.hpp"
#include "tests/isa_reference.hpp"

using qpu::isa::assemble;
using qpu::isa::Fault;
using qpu::isa::rules;
using qpu::isa::verify;
using qpu::isa::Word;

namespace {

// Assembles lines that are separated by "|". If `ended` is true, appends the program end and its
// delay slots.
std::vector<Word> program(const std::string& lines, bool ended = true) {
  std::vector<Word> words;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line, '|');) words.push_back(assemble(line));
  if (!ended) return words;
  words.push_back(assemble("nop; thrend"));
  words.push_back(assemble("nop"));
  words.push_back(assemble("nop"));
  return words;
}

std::string all(const std::vector<Fault>& faults) {
  std::string text;
  for (const Fault& f : faults) text += std::string(f.rule) + " - " + f.text + "\n";
  return text;
}

struct Case {
  const char* rule;
  std::size_t instruction;  // the instruction at which the fault is reported
  std::size_t cause;
  std::string broken;
  std::string fixed;
  bool ended = true;  // if true, the program end is appended
};

const std::string kReadSetup = "ldi vpm_rd_setup, 0x00101a00";  // announces one vector
const std::string kLoadSetup = "ldi vpm_rd_setup, 0x83041080";  // loads 4 rows, starting at row 8
const std::string kStoreSetup = "ldi vpm_wr_setup, 0x82104400";
const std::string kDmaWaits = "|nop; read vpm_ld_wait|nop";

std::vector<Case> cases() {
  std::vector<Case> c{
      {"unknown-instruction", 0, 0, ".word 0xffffffffffffffff", "nop"},
      {"breakpoint", 0, 0, "nop; bkpt", "nop"},
      {"thread-switch", 0, 0, "nop; thrsw", "nop"},
      {"thread-switch", 1, 1, "nop|nop; lthrsw", "nop|nop"},
      {"nop-writes", 0, 0, ".word 0x100000e7009e7000", "nop"},
      {"nop-writes", 0, 0, ".word 0x100009c3009e7000", "nop"},
      {"reserved-pack", 0, 0, ".word 0xe19049c00000002a", "nop; ldi rb0, 42"},
      {"pack-on-io", 0, 0, "mov host_int.8a, 1", "mov host_int, 1"},
      {"pack-on-io", 1, 1, "ldi r0, 1|mov r1.8a, r0", "ldi r0, 1|nop; mov r1.c8a, r0"},
      {"pack-on-io", 1, 1, "ldi r0, 1|nop; mov host_int.c8a, r0", "ldi r0, 1|mov ra1.8a, r0"},
      {"unpack-on-io", 0, 0, "mov r0, uniform.8a", "mov ra0, uniform|nop|mov r0, ra0.8a"},
      {"mixed-unpack", 2, 2, "ldi ra0, 1|ldi r1, 0|add r0, ra0.8a, r1; fmul r2, ra0.8a, r1",
       "ldi ra0, 1|ldi r1, 0|fadd r0, ra0.8a, r1; fmul r2, ra0.8a, r1"},
      {"same-destination", 1, 1, "ldi r1, 2|mov r0, r1; mov r0, 1",
       "mov r0, 1; mov r0, 1|ldi host_int, 1; ldi host_int, 1"},
      {"same-destination", 2, 2, "ldi r1, 2|mov.sf r0, 1|mov.zs r0, 1; mov.zc r0, r1",
       "ldi r1, 2|mov.sf r0, 1|mov.zs r0, 1|nop; mov.zc r0, r1"},
      {"io-read-twice", 0, 0, "or r0, uniform, uniform.b", "mov r0, uniform|or r0, r0, uniform.b"},
      {"one-peripheral", 1, 1, "ldi r0, 0|mov tmu0_s, r0; mov sfu_recip, r0|nop|nop|nop; ldtmu0",
       "ldi r0, 0|mov tmu0_s, r0|mov sfu_recip, r0|nop|nop|nop; ldtmu0"},
      {"one-peripheral", 2, 2, "ldi r0, 0|mov tmu0_s, r0|mov tmu0_s, r0; ldtmu0|nop; ldtmu0",
       "ldi r0, 0|mov tmu0_s, r0|mov tmu0_s, r0|nop; ldtmu0|nop; ldtmu0"},
      {"one-peripheral", 1, 1, "ldi r0, 0|mov sfu_exp, r0; read mutex|ldi mutex, 0",
       "ldi r0, 0|mov sfu_exp, r0|nop; read mutex|ldi mutex, 0"},
      {"semaphore-writes", 0, 0, ".word 0xe8020e2700000003|nop; ldtmu0", "srel 3"},
      {"conditional-trigger", 1, 1, "mov.sf r0, 1|mov.zs tmu0_s, r0|nop; ldtmu0",
       "mov.sf r0, 1|mov tmu0_s, r0|nop; ldtmu0"},
      {"conditional-trigger", 0, 0, "mov.never mutex, 1", "mov mutex, 1"},
      {"vpm-pair", 2, 2,
       kLoadSetup + "|mov r0, 0|mov vpm_ld_addr, r0; read vpm_st_busy" + kDmaWaits,
       kLoadSetup + "|mov r0, 0|mov vpm_ld_addr, r0|nop; read vpm_st_busy" + kDmaWaits},
      {"vpm-pair", 6, 6,
       "ldi r0, 0|mov tmu0_s, r0|" + kReadSetup + "|nop|nop|nop|mov r0, vpm; ldtmu0",
       "ldi r0, 0|mov tmu0_s, r0|" + kReadSetup + "|nop|nop|nop|mov r0, vpm|nop; ldtmu0"},
      {"end-writes-register", 1, 1, "mov r0, 1|mov rb3, r0; thrend|nop|nop",
       "mov r0, 1|mov r3, r0; thrend|nop|nop", false},
      {"scoreboard-start", 1, 1, "nop|nop; sbwait", "nop|nop|nop; sbwait"},
      {"branch-target", 0, 0, "brr 4|nop|nop|nop", "brr 0|nop|nop|nop"},
      {"branch-target", 0, 0, "brr -40|nop|nop|nop", "nop"},
      {"branch-target", 0, 0, "brr 1000|nop|nop|nop|", "brr 0|nop|nop|nop"},
      {"branch-target", 0, 0, "bra 0x0|nop|nop|nop", "brr -32|nop|nop|nop"},
      {"branch-target", 2, 2, "ldi ra0, 0|nop|brr ra0, 0|nop|nop|nop", "brr -32|nop|nop|nop"},
      {"runs-out", 0, 0, "", "nop; thrend|nop|nop", false},
      {"runs-out", 1, 1, "nop|nop", "nop; thrend|nop|nop", false},
      {"runs-out", 1, 1, "nop; thrend|nop", "nop; thrend|nop|nop", false},
      {"runs-out", 2, 2, "brr -32|nop|nop", "brr -32|nop|nop|nop", false},
      {"runs-out", 4, 4, "mov.sf -, 1|brr.anyzs -40|nop|nop|nop",
       "mov.sf -, 1|brr -40|nop|nop|nop", false},
      {"branch-in-delay-slot", 3, 0, "brr 0|nop|nop|brr 0|nop|nop|nop",
       "brr 0|nop|nop|nop|brr 0|nop|nop|nop"},
      {"branch-near-end", 3, 0, "brr 0|nop|nop|nop; thrend", "brr 0|nop|nop|nop"},
      {"branch-near-end", 2, 1, "nop|nop; thrend|brr 0|nop|nop", "nop|nop; thrend|nop|nop"},
      {"register-file-latency", 1, 0, "ldi ra1, 1|mov r0, ra1", "ldi ra1, 1|nop|mov r0, ra1"},
      {"register-file-latency", 1, 0, "ldi rb1, 1|nop; mov r0, rb1", "ldi rb1, 1|nop|mov r0, rb1"},
      {"sfu-latency", 2, 0, "mov sfu_log, 1.0|nop|mov r0, r4",
       "mov sfu_log, 1.0|nop|nop|mov r0, r4"},
      {"sfu-result-write", 1, 0, "mov sfu_log, 1.0|mov sfu_exp, 1.0",
       "mov sfu_log, 1.0|nop|nop|mov sfu_exp, 1.0"},
      {"sfu-result-write", 3, 1, "mov tmu0_s, 0|mov sfu_log, 1.0|nop|nop; ldtmu0",
       "mov tmu0_s, 0|mov sfu_log, 1.0|nop|nop|nop; ldtmu0"},
      {"rotate-by-r5-latency", 2, 1, "mov r0, 1|mov r5_quad, r0|nop; mov.rotr5 r1, r0",
       "mov r0, 1|mov r5_all, r0|nop|nop; mov.rotr5 r1, r0"},
      {"rotate-source-latency", 1, 0, "mov r0, 1|nop; mov.rot1 r1, r0",
       "mov r0, 1|nop|nop; mov.rot1 r1, r0"},
      {"rotate-source-latency", 3, 2, "mov tmu0_s, 0|nop|nop; ldtmu0|nop; mov.rot1 r1, r4",
       "mov tmu0_s, 0|nop|nop; ldtmu0|nop|nop; mov.rot1 r1, r4"},
      {"noswap-latency", 2, 0, "ldi tmu_noswap, 1|nop|mov tmu0_s, 0|nop; ldtmu0",
       "ldi tmu_noswap, 1|nop|nop|mov tmu0_s, 0|nop; ldtmu0"},
      {"uniforms-address-latency", 2, 0, "ldi uniforms_addr, 64|nop|mov r0, uniform",
       "ldi uniforms_addr, 64|nop|nop|mov r0, uniform"},
      {"uniforms-address-latency", 1, 0, "ldi uniforms_addr, 64|mov tmu0_b, 0",
       "ldi uniforms_addr, 64|nop|nop|mov tmu0_b, 0"},
      {"vpm-read-latency", 3, 0, kReadSetup + "|nop|nop|mov r0, vpm",
       kReadSetup + "|nop|nop|nop|mov r0, vpm"},
      {"tlb-z-latency", 3, 1, "mov r0, 0|mov tlb_z, r0|nop|mov r1, ms_flags",
       "mov r0, 0|mov tlb_z, r0|nop|nop|mov r1, ms_flags"},
      {"end-uniform", 1, 0, "nop; thrend|mov r0, uniform|nop",
       "mov r0, uniform|nop; thrend|nop|nop", false},
      {"end-uniform", 0, 0, "mov r0, varying; thrend|nop|nop",
       "mov r0, varying|nop; thrend|nop|nop", false},
      {"end-vpm", 2, 0, "nop; thrend|nop|nop; read vpm_st_wait",
       "nop; read vpm_st_wait|nop; thrend|nop|nop", false},
      {"end-address-14", 1, 0, "nop; thrend|ldi rb14, 0|nop", "ldi rb14, 0|nop; thrend|nop|nop",
       false},
      {"end-address-14", 3, 1, "ldi ra14, 0|nop; thrend|nop|mov r0, ra14",
       "ldi ra14, 0|nop|mov r0, ra14|nop; thrend|nop|nop", false},
      {"end-tlb-z", 2, 0, "nop; thrend|nop|ldi tlb_z, 0", "nop; thrend|ldi tlb_z, 0|nop", false},
      {"uninitialised", 0, 0, "mov r0, r1", "mov r1, 0|mov r0, r1"},
      {"uninitialised", 0, 0, "mov r0, ra31; mov r1, rb0",
       "ldi ra31, 0|ldi rb0, 0|nop|mov r0, ra31"},
      {"uninitialised", 0, 0, "brr.anyzs 0|nop|nop|nop", "mov.sf -, 1|brr.anyzs 0|nop|nop|nop"},
      {"tmu-depth", 4, 4,
       "mov tmu0_s, 0|mov tmu0_s, 0|mov tmu0_s, 0|mov tmu0_s, 0|mov tmu0_s, 0|nop; ldtmu0|"
       "nop; ldtmu0|nop; ldtmu0|nop; ldtmu0",
       "mov tmu0_s, 0|mov tmu0_s, 0|mov tmu0_s, 0|mov tmu0_s, 0|nop; ldtmu0|mov tmu0_s, 0|"
       "nop; ldtmu0|nop; ldtmu0|nop; ldtmu0|nop; ldtmu0"},
      {"tmu-empty", 2, 2, "mov tmu1_s, 0|nop; ldtmu1|nop; ldtmu1", "mov tmu1_s, 0|nop; ldtmu1"},
      {"tmu-left", 1, 1, "mov tmu1_s, 0", "mov tmu1_s, 0|nop; ldtmu1"},
      {"tmu-swap", 0, 0, "mov tmu0_s, 0|ldi tmu_noswap, 1|nop|nop|mov tmu1_s, 0|nop; ldtmu0|"
       "nop; ldtmu1",
       "ldi tmu_noswap, 1|nop|nop|mov tmu0_s, 0|mov tmu1_s, 0|nop; ldtmu0|nop; ldtmu1"},
      {"setup-word", 0, 0, "ldi vpm_wr_setup, 0x00001b08", "ldi vpm_wr_setup, 0x00001a08"},
      {"setup-word", 0, 0, "ldi vpm_wr_setup, 0x00001a40", "ldi vpm_wr_setup, 0x00001a3f"},
      {"setup-word", 0, 0, "ldi vpm_wr_setup, 0x40000000", "ldi vpm_wr_setup, 0"},
      {"setup-word", 0, 0, "ldi vpm_wr_setup, 0xc0002000", "ldi vpm_wr_setup, 0xc0001fff"},
      {"setup-word", 0, 0, "ldi vpm_wr_setup, 0x82106000", "ldi vpm_wr_setup, 0x82104000"},
      {"setup-word", 0, 0, "ldi vpm_wr_setup, 0x82104401", "ldi vpm_wr_setup, 0x82104402"},
      {"setup-word", 3, 3, "ldi r0, 0x83041000|ldi rb1, 0x400|nop|or vpm_rd_setup, r0, rb1",
       "ldi r0, 0x83041000|ldi rb1, 0x300|nop|or vpm_rd_setup, r0, rb1"},
      {"vpm-read-empty", 5, 5, kReadSetup + "|nop|nop|nop|mov r0, vpm|mov r0, vpm",
       kReadSetup + "|nop|nop|nop|mov r0, vpm"},
      {"vpm-read-outstanding", 1, 1, kReadSetup + "|" + kReadSetup + "|nop|nop|nop|mov r0, vpm",
       kReadSetup + "|nop|nop|nop|mov r0, vpm|" + kReadSetup + "|nop|nop|nop|mov r0, vpm"},
      {"vpm-read-left", 1, 1, kReadSetup, kReadSetup + "|nop|nop|nop|mov r0, vpm"},
      {"vpm-write-setup", 0, 0, "mov vpm, 1", "ldi vpm_wr_setup, 0xa00|mov vpm, 1"},
      {"dma-load-setup", 0, 0, "mov vpm_ld_addr, 0" + kDmaWaits,
       kLoadSetup + "|mov vpm_ld_addr, 0" + kDmaWaits},
      {"dma-store-setup", 1, 1, "ldi vpm_wr_setup, 0xa00|mov vpm_st_addr, 0|nop; read vpm_st_wait",
       kStoreSetup + "|mov vpm_st_addr, 0|nop; read vpm_st_wait"},
      {"dma-load-overlap", 2, 2, kLoadSetup + "|mov vpm_ld_addr, 0|mov vpm_ld_addr, 1" + kDmaWaits,
       kLoadSetup + "|mov vpm_ld_addr, 0" + kDmaWaits + "|mov vpm_ld_addr, 1" + kDmaWaits},
      {"dma-store-overlap", 2, 2,
       kStoreSetup + "|mov vpm_st_addr, 0|mov vpm_st_addr, 1|nop; read vpm_st_wait",
       kStoreSetup + "|mov vpm_st_addr, 0|nop; read vpm_st_wait|mov vpm_st_addr, 1|"
       "nop; read vpm_st_wait"},
      {"dma-load-read", 2, 2,
       kLoadSetup + "|mov vpm_ld_addr, 0|ldi vpm_rd_setup, 0x00101a0b|nop|nop|nop|mov r0, vpm" +
           kDmaWaits,
       kLoadSetup + "|mov vpm_ld_addr, 0" + kDmaWaits +
           "|ldi vpm_rd_setup, 0x00101a0b|nop|nop|nop|mov r0, vpm"},
      {"dma-load-read", 2, 2,
       kLoadSetup + "|mov vpm_ld_addr, 0|ldi vpm_rd_setup, 0x00101200|nop|nop|nop|mov r0, vpm" +
           kDmaWaits,
       kLoadSetup + "|mov vpm_ld_addr, 0|ldi vpm_rd_setup, 0x00101a0c|nop|nop|nop|mov r0, vpm" +
           kDmaWaits},
      {"dma-left", 2, 2, kStoreSetup + "|mov vpm_st_addr, 0",
       kStoreSetup + "|mov vpm_st_addr, 0|nop; read vpm_st_wait"},
      {"mutex-left", 1, 1, "mov r0, mutex", "mov r0, mutex|mov mutex, 1"},
  };
  return c;
}

}  // namespace

TEST_CASE("every rule detects its violation and accepts its fix") {
  std::set<std::string> tested;
  for (const Case& c : cases()) {
    INFO(std::string(c.rule), ": ", c.broken);
    tested.insert(c.rule);
    const auto faults = verify(program(c.broken, c.ended));
    INFO(all(faults));
    REQUIRE_FALSE(faults.empty());
    for (const Fault& f : faults) CHECK(std::string(f.rule) == c.rule);
    CHECK(faults[0].instruction == c.instruction);
    CHECK(faults[0].cause == c.cause);
    const auto fixed = verify(program(c.fixed, c.ended));
    INFO(c.fixed, "\n", all(fixed));
    CHECK(fixed.empty());
  }
  for (const qpu::isa::Rule& r : rules()) {
    INFO(std::string(r.name));
    CHECK(tested.count(r.name) == 1);
  }
}

namespace {

// Lists each fault as "rule@instruction<cause". The cause is omitted if it is the same instruction.
std::string brief(const std::vector<Word>& words) {
  std::string text;
  for (const Fault& f : verify(words)) {
    if (!text.empty()) text += " ";
    text += std::string(f.rule) + "@" + std::to_string(f.instruction);
    if (f.cause != f.instruction) text += "<" + std::to_string(f.cause);
  }
  return text;
}

}  // namespace

TEST_CASE("latencies extend across delay slots and branches") {
  // The last delay slot writes the register. Both paths read the register in their first
  // instruction.
  CHECK(brief(program("mov.sf -, 1|brr.anyzs 8|nop|nop|ldi ra1, 1|mov r0, ra1|mov r1, ra1")) ==
        "register-file-latency@5<4 register-file-latency@6<4");
  // If an earlier delay slot writes the register, there is no fault.
  CHECK(brief(program("mov.sf -, 1|brr.anyzs 0|nop|ldi ra1, 1|nop|mov r0, ra1")).empty());
  // On the path through the taken branch, the instruction that reads r4 (6) follows the SFU write
  // (3, in a delay slot) at a distance of two.
  CHECK(brief(program("brr 8|nop|nop|mov sfu_exp, 1.0|nop|nop|mov r0, r4")) == "sfu-latency@6<3");
  // A branch that is always taken has no path to the instruction after its delay slots.
  CHECK(brief(program("ldi ra1, 0|brr 8|nop|nop|ldi ra1, 1|mov r0, ra1|nop")).empty());
  // In a loop, the end of the body is checked against the start of the body.
  CHECK(brief(program("ldi ra1, 0|mov.sf -, 1|mov r0, ra1|brr.anyzs -40|nop|nop|ldi ra1, 1")) ==
        "register-file-latency@2<6");
  // The branch reads its register in the instruction after the write.
  CHECK(brief(program("ldi ra1, 0|bra ra1, 0|nop|nop|nop", false)) ==
        "register-file-latency@1<0 branch-target@1");
}

TEST_CASE("a jump into delay slots runs them without the branch") {
  // Instruction 0 jumps to instruction 6, which is the second delay slot of the branch at 4. The
  // path therefore does not follow that branch.
  const std::string lines = "brr 16|nop|nop|nop|brr -64|nop|nop|nop|nop";
  CHECK(brief(program(lines)).empty());
  // The path runs past the end of the program, because it does not follow the branch at 4.
  CHECK(brief(program(lines, false)) == "runs-out@8");
}

TEST_CASE("registers must be defined on every path") {
  CHECK(brief(program("mov.sf -, 1|brr.anyzs 8|nop|nop|nop|ldi ra1, 1|nop|mov r0, ra1")) ==
        "uninitialised@7");
  CHECK(brief(program("mov.sf -, 1|brr.anyzs 8|nop|nop|ldi ra1, 1|ldi ra1, 2|nop|mov r0, ra1"))
            .empty());
  // A write at the end of the loop does not define the register in the first iteration.
  CHECK(brief(program("mov.sf -, 1|mov r0, r1|brr.anyzs -40|nop|nop|mov r1, 1")) ==
        "uninitialised@1");
  // An operation that combines a register with itself and always results in 0 is not treated as a
  // read.
  CHECK(brief(program("xor r0, r0, r0; v8subs r1, r2, r2")).empty());
  CHECK(brief(program("sub.sf ra0, r0, r0|mov.zs r1, 1")).empty());
  CHECK(brief(program("nop; fmul r1, r2, r2")) == "uninitialised@0");
  CHECK(brief(program("mov r0, 1|nop|nop; mov.rotr5 r1, r0")) == "uninitialised@2");
  CHECK(brief(program("mov r0, r4")) == "uninitialised@0");
  CHECK(brief(program("mov sfu_exp, 1.0|nop|nop|mov r0, r4")).empty());
  CHECK(brief(program("ldi r0, 7; ldi rb1, 7|nop|mov r1, rb1; mov r2, r0")).empty());
  // When a branch is taken, it writes its link register.
  CHECK(brief(program("brr 0; link ra1|nop|nop|nop|mov r0, ra1")).empty());
}

TEST_CASE("counts are faults if they are wrong on every path") {
  // Only one of the two paths contains the request. It is possible that the program never takes the
  // path without the request.
  const std::string maybe = "mov.sf -, 1|brr.anyzs 0|nop|nop|mov tmu0_s, 0|nop; ldtmu0";
  CHECK(brief(program(maybe)).empty());
  CHECK(brief(program("mov.sf -, 1|brr.anyzs 8|nop|nop|nop|mov tmu0_s, 0|nop; ldtmu0")).empty());
  CHECK(brief(program("mov.sf -, 1|brr.anyzs 8|nop|nop|nop|mov tmu0_s, 0|nop; ldtmu0|"
                      "nop; ldtmu0")) == "tmu-empty@7");
  // This loop requests without receiving, but it may have only one iteration.
  CHECK(brief(program("mov.sf -, 1|mov tmu0_s, 0|brr.anyzs -40|nop|nop|nop|nop; ldtmu0")).empty());
  // This loop receives as much as it requests, so any number of iterations is valid.
  CHECK(brief(program("mov.sf -, 1|mov tmu0_s, 0|mov tmu0_s, 0|brr.anyzs -40|nop; ldtmu0|nop|nop|"
                      "nop; ldtmu0"))
            .empty());
  // If a setup word is not constant, the number of vectors is unknown.
  CHECK(brief(program("mov vpm_rd_setup, uniform|nop|nop|nop|mov r0, vpm|mov r0, vpm")).empty());
  CHECK(brief(program("mov vpm_rd_setup, uniform|nop|nop|mov r0, vpm")) == "vpm-read-latency@3<0");
  // A DMA setup has the same address as a VPM setup, but does not change the VPM setup.
  CHECK(brief(program("ldi vpm_rd_setup, 0x00201a00|nop|nop|nop|mov r0, vpm|" + kLoadSetup +
                      "|mov r0, vpm"))
            .empty());
}

TEST_CASE("a DMA transfer that runs on any path counts") {
  const std::string start = kStoreSetup + "|mov vpm_st_addr, 0";
  CHECK(brief(program("mov.sf -, 1|brr.anyzs 16|nop|nop|nop|" + start)) == "dma-left@7");
  CHECK(brief(program("mov.sf -, 1|brr.anyzs 16|nop|nop|nop|" + start + "|nop; read vpm_st_wait"))
            .empty());
  // If a store is in a loop, there must be a wait before the next iteration.
  CHECK(brief(program(kStoreSetup + "|mov.sf -, 1|mov vpm_st_addr, 0|brr.anyzs -40|nop|nop|nop|"
                                    "nop; read vpm_st_wait")) == "dma-store-overlap@2");
  // A loop that reads BUSY until it is clear is also treated as a wait.
  CHECK(brief(program(start + "|mov.sf -, vpm_st_busy|brr.anyzc -40|nop|nop|nop")).empty());
}

TEST_CASE("constants propagate through registers and joins") {
  // The two paths set the same constant in the first program, and different constants in the
  // second.
  const std::string diamond = "mov.sf -, 1|brr.anyzs 8|nop|nop|ldi r0, 0x1b08|";
  CHECK(brief(program(diamond + "ldi r0, 0x1b08|mov vpm_wr_setup, r0")) == "setup-word@6");
  CHECK(brief(program(diamond + "ldi r0, 0x1a08|mov vpm_wr_setup, r0")).empty());
  CHECK(brief(program("ldi ra1, 0x1b|mov r1, 8|shl r0, ra1, r1|or vpm_wr_setup, r0, 8")) ==
        "setup-word@3");
  CHECK(brief(program("ldi r0, 0x1b08|nop; mov rb1, r0|nop|mov vpm_wr_setup, rb1")) ==
        "setup-word@3");
  // If the register is written only in some elements, or if the value is packed, the value is
  // unknown.
  CHECK(brief(program("ldi r0, 0x1a08|mov.sf -, 1|ldi.zs r0, 0x1b08|mov vpm_wr_setup, r0"))
            .empty());
  CHECK(brief(program("ldi ra0, 0x1b08|ldi ra0.16a, 0x1a08|nop|mov vpm_wr_setup, ra0")).empty());
}

TEST_CASE("fault texts name the instructions and the rule") {
  const auto faults = verify(program("ldi ra1, 1|mov r0, ra1"));
  REQUIRE(faults.size() == 1);
  CHECK(faults[0].text ==
        "instruction 1 (mov r0, ra1) after instruction 0 (ldi ra1, 0x1): a register of file A or B "
        "is not readable in the instruction after its write");
  CHECK(verify({})[0].text ==
        "instruction 0: a path leaves the program without a program end and its two delay slots: the "
        "program is empty");
}

TEST_CASE("a complete kernel has no faults") {
  // Computes c[i] = a[i] + b[i] for 16 elements at a time. The program uses both TMUs, issues
  // requests one iteration in advance, and stores by DMA.
  CHECK(brief(program("ldi tmu_noswap, 1|"
                      "mov ra0, uniform|"                          // a
                      "mov rb0, uniform|"                          // b
                      "mov ra1, uniform|"                          // c
                      "mov r3, uniform|"                           // number of vectors
                      "shl r0, element_number, 2|"
                      "add r1, ra0, r0|"
                      "mov r2, rb0|"
                      "add r2, r2, r0; mov tmu0_s, r1|"
                      "mov tmu1_s, r2|"
                      "ldi rb1, 0x40|"
                      "nop|"
                      // Instruction 12: the start of the loop.
                      "add r1, r1, rb1|"
                      "add r2, r2, rb1|"
                      "nop; ldtmu0|"
                      "mov r0, r4; mov tmu0_s, r1|"
                      "nop; ldtmu1|"
                      "fadd r0, r0, r4; mov tmu1_s, r2|"
                      "nop; read vpm_st_wait|"
                      "ldi vpm_wr_setup, 0xa00|"
                      "mov vpm, r0|"
                      "ldi vpm_wr_setup, 0x80904000|"
                      "sub.sf r3, r3, 1|"
                      "brr.allzc -120|"
                      "mov vpm_st_addr, ra1|"
                      "add ra1, ra1, rb1|"
                      "nop|"
                      "nop; ldtmu0|"
                      "nop; ldtmu1|"
                      "nop; read vpm_st_wait|"
                      "ldi host_int, 1"))
            .empty());
}

TEST_CASE("verifying random programs does not crash") {
  std::mt19937_64 random(21);
  const std::vector<isa_build::Reference> known = isa_build::references();
  std::size_t faults = 0;
  for (int n = 0; n < 3000; ++n) {
    std::vector<Word> words;
    for (std::uint64_t count = random() % 40; count > 0; --count) {
      const Word word = random() % 8 == 0 ? random() : known[random() % known.size()].word;
      words.push_back(word);
      // The branch target is an arbitrary instruction in the program.
      if (word >> 60U == 15 && random() % 2 == 0)
        words.back() = (word & ~Word{0xffffffff}) |
                       ((random() % 40 * 8 - words.size() * 8 - 24) & 0xffffffff) | Word{8} << 48U;
    }
    const auto found = verify(words);
    faults += found.size();
    CHECK(std::is_sorted(found.begin(), found.end(), [](const Fault& a, const Fault& b) {
      return a.instruction < b.instruction;
    }));
    for (const Fault& f : found) {
      if (f.instruction >= std::max<std::size_t>(words.size(), 1) ||
          f.cause >= std::max<std::size_t>(words.size(), 1))
        FAIL_CHECK(f.text);
    }
  }
  CHECK(faults > 10000);
}

TEST_CASE("long programs are verified quickly") {
  // The program has 20,000 instructions. Every eighth instruction branches to the start.
  std::string lines = "mov.sf r0, 1; mov r1, 1|ldi ra1, 1; ldi rb1, 1|nop|nop";
  std::vector<Word> words = program(lines, false);
  while (words.size() < 20000) {
    const auto back = -static_cast<std::int64_t>(words.size() * 8 + 4 * 8);
    for (const Word w : program("brr.anyzs " + std::to_string(back) +
                                "|nop|nop|nop|fadd r0, r0, ra1; fmul r1, r1, rb1|nop|nop|nop",
                                false))
      words.push_back(w);
  }
  for (const Word w : program("")) words.push_back(w);
  CHECK(verify(words).empty());
}
