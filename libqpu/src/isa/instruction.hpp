// The instructions of the VideoCore IV QPU as structures of fields, and their conversion to and
// from 64-bit words. Manual: section 3, QPU instruction encoding.
#ifndef QPU_SRC_ISA_INSTRUCTION_HPP
#define QPU_SRC_ISA_INSTRUCTION_HPP

#include <cstdint>
#include <optional>

namespace qpu::isa {

using Word = std::uint64_t;

// The values of the enumerators are the numbers in the encoding.
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

// Selects the elements to which a result is written.
enum class Cond : std::uint8_t {
  Never, Always, ZSet, ZClear, NSet, NClear, CSet, CClear
};

enum class BranchCond : std::uint8_t {
  AllZSet, AllZClear, AnyZSet, AnyZClear, AllNSet, AllNClear, AnyNSet, AnyNClear,
  AllCSet, AllCClear, AnyCSet, AnyCClear,
  Always = 15
};

enum class Mux : std::uint8_t { R0, R1, R2, R3, R4, R5, A, B };

// Addresses from 32 on. Lower addresses are registers. The comments state for which accesses and
// files a name is valid.
namespace address {
constexpr std::uint8_t kUniform = 32;        // read A, B
constexpr std::uint8_t kElementNumber = 38;  // read A
constexpr std::uint8_t kQpuNumber = 38;      // read B
constexpr std::uint8_t kNop = 39;            // read and write, A and B
constexpr std::uint8_t kR0 = 32;             // write; kR0 + n is rn for n = 0..3
constexpr std::uint8_t kTmuNoSwap = 36;      // write
// Write A: one element per quad; write B: the same element in all elements.
constexpr std::uint8_t kR5 = 37;
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
constexpr std::uint8_t kTmu0S = 56;          // write S; the next addresses are T, R and B
constexpr std::uint8_t kTmu1S = 60;
}  // namespace address

enum class Form : std::uint8_t {
  Alu, Branch, LoadImmediate, LoadPerElementSigned, LoadPerElementUnsigned, Semaphore
};

// The default values are those of a nop. Fields that a form does not have keep their default
// values.
struct Instruction {
  Form form = Form::Alu;
  Signal signal = Signal::None;  // Alu; with SmallImmediate, raddrB is an immediate's code (0..63)
  std::uint8_t unpack = 0;       // Alu; 0..7
  bool pm = false;               // Alu, LoadImmediate*, Semaphore
  std::uint8_t pack = 0;         // all forms except Branch; 0..15
  Cond condAdd = Cond::Never;    // all forms except Branch
  Cond condMul = Cond::Never;
  bool setFlags = false;         // all forms except Branch
  bool swap = false;             // ws: the ADD result goes to file B and the MUL result to file A
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
  // Branch: signed number of bytes; Semaphore: bit 4 means acquire, bits 3:0 are the number of the
  // semaphore.
  std::uint32_t immediate = 0;
  BranchCond branchCond = BranchCond::Always;
  bool branchRelative = false;
  bool branchRegister = false;       // adds ra[branchRegisterA] to the target
  std::uint8_t branchRegisterA = 0;  // 0..31

  bool operator==(const Instruction& other) const;
  bool operator!=(const Instruction& other) const { return !(*this == other); }
};

// All fields must be in their ranges.
Word encode(const Instruction& instruction);

// Returns std::nullopt if the word contains reserved values (an unknown operation, branch condition
// 12..14, load-immediate mode 2 or 5..7, and so on). encode(*decode(w)) == w if w has no set bits
// that the form ignores.
std::optional<Instruction> decode(Word word);

// Returns the value on mux B for a small-immediate code (0..63). Manual: table of small immediates.
// Codes 48..63 are rotations. Their values are -16..-1.
std::uint32_t smallImmediate(std::uint8_t code);

// Returns the code in 0..47 whose value is `bits`, or std::nullopt if there is no such code.
std::optional<std::uint8_t> smallImmediateCode(std::uint32_t bits);

}  // namespace qpu::isa

#endif
