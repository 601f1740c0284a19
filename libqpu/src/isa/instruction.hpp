// The VideoCore IV QPU's instructions as fields, and their conversion from and to 64-bit words.
// Manual: section 3, QPU instruction encoding.
#ifndef QPU_SRC_ISA_INSTRUCTION_HPP
#define QPU_SRC_ISA_INSTRUCTION_HPP

#include <cstdint>
#include <optional>

namespace qpu::isa {

using Word = std::uint64_t;

// The numbers are those of the encoding.
enum class Signal : std::uint8_t {
  Breakpoint, None, ThreadSwitch, End, WaitScoreboard, UnlockScoreboard, LastThreadSwitch,
  LoadCoverage, LoadColour, LoadColourEnd, LoadTmu0, LoadTmu1, LoadAlpha, SmallImmediate,
  LoadImmediate, Branch
};

enum class AddOp : std::uint8_t {
  Nop, FAdd, FSub, FMin, FMax, FMinAbs, FMaxAbs, FtoI, ItoF,
  Add = 12, Sub, Shr, Asr, Ror, Shl, Min, Max, And, Or, Xor, Not, Clz,
  V8AddS = 30, V8SubS
};

enum class MulOp : std::uint8_t { Nop, FMul, Mul24, V8MulD, V8Min, V8Max, V8AddS, V8SubS };

// The elements to which a result is written.
enum class Cond : std::uint8_t {
  Never, Always, ZSet, ZClear, NSet, NClear, CSet, CClear
};

enum class BranchCond : std::uint8_t {
  AllZSet, AllZClear, AnyZSet, AnyZClear, AllNSet, AllNClear, AnyNSet, AnyNClear,
  AllCSet, AllCClear, AnyCSet, AnyCClear,
  Always = 15
};

enum class Mux : std::uint8_t { R0, R1, R2, R3, R4, R5, A, B };

// Addresses from 32 on; lower addresses are registers. The comments state for which accesses and
// files a name is valid.
namespace address {
constexpr std::uint8_t kUniform = 32;        // read A, B
constexpr std::uint8_t kElementNumber = 38;  // read A
constexpr std::uint8_t kQpuNumber = 38;      // read B
constexpr std::uint8_t kNop = 39;            // read and write, A and B
constexpr std::uint8_t kR0 = 32;             // write; kR0 + n is rn, for r0..r3
constexpr std::uint8_t kTmuNoSwap = 36;      // write
constexpr std::uint8_t kR5 = 37;             // write A: quads, write B: all elements
constexpr std::uint8_t kHostInterrupt = 38;  // write
constexpr std::uint8_t kUniformsAddress = 40;
constexpr std::uint8_t kVpm = 48;            // read A, B: VPM_READ; write: VPM_WRITE
constexpr std::uint8_t kDmaBusy = 49;        // read A: load, read B: store
constexpr std::uint8_t kVpmSetup = 49;       // write A: read setup, write B: write setup
constexpr std::uint8_t kDmaWait = 50;        // read A: load, read B: store
constexpr std::uint8_t kDmaAddress = 50;     // write A: load, write B: store
constexpr std::uint8_t kMutex = 51;          // read: acquire, write: release
constexpr std::uint8_t kSfuRecip = 52;       // write
constexpr std::uint8_t kSfuRecipSqrt = 53;
constexpr std::uint8_t kSfuExp = 54;
constexpr std::uint8_t kSfuLog = 55;
constexpr std::uint8_t kTmu0S = 56;          // write; followed by T, R, B
constexpr std::uint8_t kTmu1S = 60;
}  // namespace address

enum class Form : std::uint8_t {
  Alu, Branch, LoadImmediate, LoadPerElementSigned, LoadPerElementUnsigned, Semaphore
};

// The defaults are those of a nop. Fields that a form does not have keep their defaults.
struct Instruction {
  Form form = Form::Alu;
  Signal signal = Signal::None;  // Alu; with SmallImmediate, raddrB is a code (0..63)
  std::uint8_t unpack = 0;       // 0..7, Alu
  bool pm = false;               // Alu, LoadImmediate*, Semaphore
  std::uint8_t pack = 0;         // 0..15, all but Branch
  Cond condAdd = Cond::Never;    // all but Branch
  Cond condMul = Cond::Never;
  bool setFlags = false;         // all but Branch
  bool swap = false;             // ws: ADD result to file B, MUL result to file A
  std::uint8_t waddrAdd = address::kNop;
  std::uint8_t waddrMul = address::kNop;
  AddOp opAdd = AddOp::Nop;
  MulOp opMul = MulOp::Nop;
  std::uint8_t raddrA = address::kNop;
  std::uint8_t raddrB = address::kNop;
  Mux addA = Mux::R0;
  Mux addB = Mux::R0;
  Mux mulA = Mux::R0;
  Mux mulB = Mux::R0;
  std::uint32_t immediate = 0;   // Branch: signed bytes; Semaphore: bit 4 acquire, 3:0 number
  BranchCond branchCond = BranchCond::Always;
  bool branchRelative = false;
  bool branchRegister = false;       // add ra[branchRegisterA] to the target
  std::uint8_t branchRegisterA = 0;  // 0..31

  bool operator==(const Instruction& other) const;
  bool operator!=(const Instruction& other) const { return !(*this == other); }
};

// All fields must be in range.
Word encode(const Instruction& instruction);

// Returns nothing for words with reserved values (unknown operation, branch condition 12..14, load-immediate mode 2 or
// 5..7, and so on). encode(*decode(w)) == w, unless w has bits set that the form ignores.
std::optional<Instruction> decode(Word word);

// The value of small-immediate code 0..63 on mux B. Manual: table of small immediates. Codes 48..63 are rotations, and
// their values are -16..-1.
std::uint32_t smallImmediate(std::uint8_t code);

// The code 0..47 whose value is `bits`, if there is one.
std::optional<std::uint8_t> smallImmediateCode(std::uint32_t bits);

}  // namespace qpu::isa

#endif
