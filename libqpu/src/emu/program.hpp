// A program made ready for running: fields resolved to places, and every rule
// that needs no running checked. Launches share it: nothing in it changes.
#ifndef QPU_SRC_EMU_PROGRAM_HPP
#define QPU_SRC_EMU_PROGRAM_HPP

#include <cstdint>
#include <vector>

#include "emu/alu.hpp"
#include "isa/instruction.hpp"

namespace qpu::emu {

// Vectors of a QPU by number: the registers, what reading a file's port or r4
// has given, and the program's constants from kConstants on.
namespace slot {
constexpr std::uint16_t kFileA = 0;
constexpr std::uint16_t kFileB = 32;
constexpr std::uint16_t kAccumulators = 64;  // r0..r5
constexpr std::uint16_t kR4 = 68;
constexpr std::uint16_t kR5 = 69;
constexpr std::uint16_t kRegisters = 70;     // their number
constexpr std::uint16_t kNowhere = 70;       // results that nobody keeps
constexpr std::uint16_t kPortA = 71;
constexpr std::uint16_t kPortB = 72;
constexpr std::uint16_t kUnpackedR4 = 73;
constexpr std::uint16_t kElementNumber = 74;
constexpr std::uint16_t kQpuNumber = 75;
constexpr std::uint16_t kConstants = 76;
}  // namespace slot

// What an instruction needs beyond two results kept in registers. Bits of
// Op::before need a look before the ALUs run, those of Op::after with the results.
namespace need {
constexpr std::uint16_t kOrder = 1U << 0U;      // all QPUs must have come this far
constexpr std::uint16_t kFault = 1U << 1U;      // may break a rule
constexpr std::uint16_t kLine = 1U << 2U;       // first of a cache line
constexpr std::uint16_t kPortA = 1U << 3U;      // read of a peripheral
constexpr std::uint16_t kPortB = 1U << 4U;
constexpr std::uint16_t kUnpack = 1U << 5U;
constexpr std::uint16_t kSemaphore = 1U << 6U;
constexpr std::uint16_t kTmuLoad = 1U << 7U;
constexpr std::uint16_t kOffEnd = 1U << 8U;
constexpr std::uint16_t kRotatesNew = 1U << 9U;  // what the instruction before may change

constexpr std::uint16_t kCondition = 1U << 0U;  // one is not Always
constexpr std::uint16_t kFlags = 1U << 1U;
constexpr std::uint16_t kPack = 1U << 2U;
constexpr std::uint16_t kRotate = 1U << 3U;
constexpr std::uint16_t kWriteIo = 1U << 4U;    // an ALU writes a peripheral or r5
constexpr std::uint16_t kR4 = 1U << 5U;         // a TMU delivers
constexpr std::uint16_t kBranch = 1U << 6U;
constexpr std::uint16_t kEnd = 1U << 7U;
constexpr std::uint16_t kSlot = 1U << 8U;       // a branch was three before
constexpr std::uint16_t kLast = 1U << 9U;       // a program end was two before
constexpr std::uint16_t kBothWrite = 1U << 10U;  // both ALUs the same; values must be equal
constexpr std::uint16_t kKeepOld = 1U << 11U;   // accumulators, for a rotation that may follow
}  // namespace need

struct Op {
  std::uint16_t before = 0;
  std::uint16_t after = 0;
  std::uint8_t add = 0;  // isa::AddOp or one of the shifts of alu.hpp
  isa::MulOp mul = isa::MulOp::Nop;
  std::uint16_t addA = 0, addB = 0, mulA = 0, mulB = 0;
  std::uint16_t addTarget = slot::kNowhere, mulTarget = slot::kNowhere;
};

// What an instruction touches, for the rules.
struct Traits {
  std::uint32_t readsA = 0, readsB = 0, writesA = 0, writesB = 0;  // registers, a bit each
  std::uint32_t accumulatorsRead = 0;  // r0..r5, a bit each
  std::uint32_t accumulatorsWritten = 0;
  std::uint32_t rotated = 0;  // accumulators that are rotated
  bool rotatesByR5 = false;
  bool readsUniform = false;
  bool readsVarying = false;
  bool touchesVpm = false;  // and its DMA
  bool writesTmu = false;
  bool writesSfu = false;
  bool loadsR4 = false;
  bool writesNoSwap = false;
  bool writesUniformsAddress = false;
  bool branches = false;
  bool ends = false;
  const char* fault = nullptr;  // a rule that it breaks alone
};

struct Fault {
  std::uint32_t instruction = 0;
  std::uint32_t distance = 0;  // to the earlier instruction that is part of it
  const char* rule = "";
};

struct Program {
  Program(const isa::Word* words, std::size_t size, std::uint32_t address);

  std::uint32_t count() const { return static_cast<std::uint32_t>(instructions.size()); }
  // The rule that jumping from branch `at` to `target` breaks, or null;
  // `brokenBy` is the instruction that breaks it.
  const char* faultOfJump(std::uint32_t at, std::uint32_t target, std::uint32_t& brokenBy) const;
  // The fault of `at`, when the `sequence` instructions before it ran just before.
  const Fault* faultAt(std::uint32_t at, std::uint32_t sequence) const;

  std::vector<Op> ops;  // and one more, for running off the end
  std::vector<isa::Instruction> instructions;
  std::vector<Traits> traits;
  std::vector<Vector> vectors;  // a QPU's by number, as they are at the start
  std::vector<Fault> faults;    // in order of instructions
  // Where a branch may jump to as far as the rules go, by instruction; of those that
  // say where, and break none.
  std::vector<std::uint32_t> goodTargets;
};

// Accumulators, a bit each, that `earlier` writes and `later`, next after it, rotates or
// (r5) rotates by: hardware may take the values from before.
std::uint32_t rotatedTooSoon(const Traits& earlier, const Traits& later);

// File of an ALU's target: true for file A.
inline bool addWritesA(const isa::Instruction& i) { return !i.swap; }
inline bool mulWritesA(const isa::Instruction& i) { return i.swap; }

bool isFloat(isa::AddOp op);        // of what it reads
bool givesFloat(isa::AddOp op);
bool readsB(isa::AddOp op);

}  // namespace qpu::emu

#endif
