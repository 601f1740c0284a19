// A program that has been prepared for execution. The fields of its instructions have been resolved
// to slots, and the static rules have been checked. A prepared program is immutable, and launches
// share it.
#ifndef QPU_SRC_EMU_PROGRAM_HPP
#define QPU_SRC_EMU_PROGRAM_HPP

#include <cstdint>
#include <vector>

#include "emu/alu.hpp"
#include "isa/instruction.hpp"

namespace qpu::emu {

// The numbers of a QPU's vectors. The numbers identify registers, values that are read through the
// port of a file, and values that are unpacked from r4. The numbers from kConstants on stand for
// the program's constants.
namespace slot {
constexpr std::uint16_t kFileA = 0;
constexpr std::uint16_t kFileB = 32;
constexpr std::uint16_t kAccumulators = 64;  // r0..r5
constexpr std::uint16_t kR4 = 68;
constexpr std::uint16_t kR5 = 69;
constexpr std::uint16_t kRegisters = 70;     // number of registers
constexpr std::uint16_t kNowhere = 70;       // target of unused results
constexpr std::uint16_t kPortA = 71;
constexpr std::uint16_t kPortB = 72;
constexpr std::uint16_t kUnpackedR4 = 73;
constexpr std::uint16_t kElementNumber = 74;
constexpr std::uint16_t kQpuNumber = 75;
constexpr std::uint16_t kConstants = 76;
}  // namespace slot

// The actions that an instruction requires in addition to writing two results to registers. The
// actions in Op::before precede the ALU operations. The actions in Op::after follow them.
namespace need {
constexpr std::uint16_t kOrder = 1U << 0U;      // all other QPUs must have reached this clock first
constexpr std::uint16_t kFault = 1U << 1U;      // the instruction can break a rule
constexpr std::uint16_t kLine = 1U << 2U;       // the instruction is the first one in a cache line
constexpr std::uint16_t kPortA = 1U << 3U;      // a peripheral is read through port A
constexpr std::uint16_t kPortB = 1U << 4U;
constexpr std::uint16_t kUnpack = 1U << 5U;
constexpr std::uint16_t kSemaphore = 1U << 6U;
constexpr std::uint16_t kTmuLoad = 1U << 7U;
constexpr std::uint16_t kOffEnd = 1U << 8U;
constexpr std::uint16_t kRotatesNew = 1U << 9U;  // rotates a value that the previous instruction may have changed

constexpr std::uint16_t kCondition = 1U << 0U;  // a condition other than Always
constexpr std::uint16_t kFlags = 1U << 1U;
constexpr std::uint16_t kPack = 1U << 2U;
constexpr std::uint16_t kRotate = 1U << 3U;
constexpr std::uint16_t kWriteIo = 1U << 4U;    // an ALU writes a peripheral or r5
constexpr std::uint16_t kR4 = 1U << 5U;         // a TMU result is received in r4
constexpr std::uint16_t kBranch = 1U << 6U;
constexpr std::uint16_t kEnd = 1U << 7U;
constexpr std::uint16_t kSlot = 1U << 8U;       // the last delay slot of a branch
constexpr std::uint16_t kLast = 1U << 9U;       // the second instruction after a program end
constexpr std::uint16_t kBothWrite = 1U << 10U;  // both ALUs write to the same address; the values must be equal
constexpr std::uint16_t kKeepOld = 1U << 11U;   // keeps the old accumulators, because a rotation may follow
}  // namespace need

struct Op {
  std::uint16_t before = 0;
  std::uint16_t after = 0;
  std::uint8_t add = 0;  // isa::AddOp, or one of the additional shifts in alu.hpp
  isa::MulOp mul = isa::MulOp::Nop;
  std::uint16_t addA = 0, addB = 0, mulA = 0, mulB = 0;
  std::uint16_t addTarget = slot::kNowhere, mulTarget = slot::kNowhere;
};

// The properties of an instruction that the rules depend on.
struct Traits {
  std::uint32_t readsA = 0, readsB = 0, writesA = 0, writesB = 0;  // one bit per register
  std::uint32_t accumulatorsRead = 0;  // one bit for each of r0..r5
  std::uint32_t accumulatorsWritten = 0;
  std::uint32_t rotated = 0;  // accumulators that are rotated, one bit each
  bool rotatesByR5 = false;
  bool readsUniform = false;
  bool readsVarying = false;
  bool touchesVpm = false;  // accesses the VPM or its DMA engines
  bool writesTmu = false;
  bool writesSfu = false;
  bool loadsR4 = false;
  bool writesNoSwap = false;
  bool writesUniformsAddress = false;
  bool branches = false;
  bool ends = false;
  const char* fault = nullptr;  // the rule that this instruction alone breaks, or null
};

struct Fault {
  std::uint32_t instruction = 0;
  std::uint32_t distance = 0;  // distance from the earlier of the two instructions
  const char* rule = "";
};

struct Program {
  Program(const isa::Word* words, std::size_t size, std::uint32_t address);

  std::uint32_t count() const { return static_cast<std::uint32_t>(instructions.size()); }
  // Returns the rule that a jump from branch `at` to `target` breaks, or null if the jump breaks no
  // rule. Sets `brokenBy` to the instruction that breaks the rule.
  const char* faultOfJump(std::uint32_t at, std::uint32_t target, std::uint32_t& brokenBy) const;
  // Returns the fault of instruction `at`, provided that the preceding `sequence` instructions have
  // been executed immediately before this instruction.
  const Fault* faultAt(std::uint32_t at, std::uint32_t sequence) const;

  std::vector<Op> ops;  // includes an additional entry for execution past the end
  std::vector<isa::Instruction> instructions;
  std::vector<Traits> traits;
  std::vector<Vector> vectors;  // initial vectors of a QPU, indexed by their numbers
  std::vector<Fault> faults;    // sorted by instruction
  // Branch targets, indexed by instruction. The entry is an invalid number unless the
  // instruction is a branch with a known target that breaks no rule.
  std::vector<std::uint32_t> goodTargets;
};

// Returns a bit mask of the accumulators that `earlier` writes and that the next instruction,
// `later`, rotates. r5 is included if `later` uses it as the rotation amount. The hardware may read
// the old values of these accumulators.
std::uint32_t rotatedTooSoon(const Traits& earlier, const Traits& later);

// These functions return true if the pipe writes to file A.
inline bool addWritesA(const isa::Instruction& i) { return !i.swap; }
inline bool mulWritesA(const isa::Instruction& i) { return i.swap; }

bool isFloat(isa::AddOp op);        // returns true if the operands are floats
bool givesFloat(isa::AddOp op);
bool readsB(isa::AddOp op);

}  // namespace qpu::emu

#endif
