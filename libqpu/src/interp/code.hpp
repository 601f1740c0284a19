// The compact form in which the interpreter executes a kernel: a sequence of instructions that
// operate on slots. A slot contains one vector per QPU. Each variable, constant and temporary
// value has a slot.
#ifndef QPU_SRC_INTERP_CODE_HPP
#define QPU_SRC_INTERP_CODE_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "lang/source.hpp"

namespace qpu::interp {

using detail::Direction;
using detail::Type;

enum class Opcode : std::uint8_t {
  // target slot <- operand slots; the order is the same as in detail::Op
  Add, Sub, Mul24, Min, Max, Shl, Asr, Shr, Ror, And, Or, Xor, Not,
  FAdd, FSub, FMul, FMin, FMax, FMaxAbs, ItoF, FtoI,
  Recip, RecipSqrt, Exp2, Log2,
  Rotate, Broadcast,
  Eq, Ne, Lt, Le, Gt, Ge, FEq, FNe, FLt, FLe, FGt, FGe,
  MaskAnd, MaskOr, MaskNot, Any, All,
  Move,
  MoveWhere,    // target <- slot a, where mask slot b is true
  // memory access
  Load,         // target <- words at the addresses in slot a
  Store,        // words at the addresses in slot b <- slot a
  StoreFirst,   // stores only the first words; slot `extra` contains their number
  Gather,       // requests the words at the addresses in slot a
  Receive,      // target <- the words of the oldest request
  // control flow; `extra` is an instruction number or an index
  Jump,
  JumpBack,     // closes a loop
  JumpIfNot,    // jumps if scalar slot a is false
  JumpIfNone,   // jumps if mask slot a is false for all elements
  JumpIfNotAll, // jumps if mask slot a is false for at least one element
  End,
  // rarely used instructions; `extra` is an index into details
  PrintText, PrintVector,
  SemaphoreRelease, SemaphoreAcquire,
  DmaReadPitch, DmaReadSetup, DmaReadStart, DmaReadWait,
  DmaWriteStride, DmaWriteSetup, DmaWriteStart, DmaWriteWait,
  VpmReadSetup, VpmWriteSetup, VpmRead, VpmWrite
};

struct Instruction {
  Opcode code;
  std::uint32_t target = 0;
  std::uint32_t a = 0;
  std::uint32_t b = 0;
  std::uint32_t extra = 0;
  std::uint32_t site = 0;  // index into Code::sites, for instructions that can fail
};

// The operands of the rarely used instructions, except the vectors.
struct Detail {
  Type element = Type::Int;
  Direction direction = Direction::Horizontal;
  int count = 0;
  int length = 0;
  int pitch = 0;
  std::string text;
};

struct Site {
  std::string construct;
  std::string description;
};

struct Preset {
  std::uint32_t slot;
  std::uint32_t bits;
};

struct Code {
  std::string name;
  std::uint32_t parameters = 0;  // the parameters are in slots 0 .. parameters - 1
  std::uint32_t slots = 0;
  std::size_t mostGathers = 4;  // maximum number of outstanding gathers
  std::vector<Preset> constants;
  // The slots that contain index(), me() and numQPUs(), or kNoSlot if the kernel does not use
  // them.
  static constexpr std::uint32_t kNoSlot = UINT32_MAX;
  std::uint32_t elementSlot = kNoSlot;
  std::uint32_t qpuSlot = kNoSlot;
  std::uint32_t countSlot = kNoSlot;
  std::vector<Instruction> instructions;
  std::vector<Site> sites;
  std::vector<Detail> details;
};

Code lower(const detail::Source& source);

// The slots that an instruction reads and writes. Checks outside the hot loop use this information.
struct Uses {
  bool a = false;
  bool b = false;
  bool target = false;
};
Uses uses(Opcode code);

}  // namespace qpu::interp

#endif
