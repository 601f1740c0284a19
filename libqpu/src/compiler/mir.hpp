// Machine operations over virtual registers: what the two halves of the compiler
// hand to each other. One operation becomes one pipe of one instruction, or a
// short fixed sequence (Sfu, spills). The order within a block is a valid
// order of execution; the back half may change it as the dependences allow.
#ifndef QPU_SRC_COMPILER_MIR_HPP
#define QPU_SRC_COMPILER_MIR_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "isa/instruction.hpp"

namespace qpu::compiler {

using Vreg = std::uint32_t;  // a vector of 16 words

// What an operation reads.
struct Operand {
  enum class Kind : std::uint8_t {
    None,
    Register,   // `value` is a Vreg
    Immediate   // `value` is a 32-bit constant that has a small-immediate code
  };
  Kind kind = Kind::None;
  std::uint32_t value = 0;

  static Operand reg(Vreg v) { return {Kind::Register, v}; }
  static Operand imm(std::uint32_t bits) { return {Kind::Immediate, bits}; }
  bool isRegister() const { return kind == Kind::Register; }
};

enum class Op : std::uint8_t {
  Add,             // `add` of the ADD pipe on a, b
  Mul,             // `mul` of the MUL pipe on a, b
  Move,            // either pipe; a may be an Immediate
  Load,            // any 32-bit `constant`
  LoadPerElement,  // `constant` in the per-element form, 0..3 each: index() & 3 and the like
  ElementNumber,   // 0..15
  Uniform,         // next word of the stream. Only at the start of the entry block, in order.
  Rotate,          // a moved up by b: an Immediate 1..15, or a register whose element 0 counts
  Broadcast,       // element `constant` (0..15) of a in all elements
  Sfu,             // function `constant` = address::kSfuRecip.. of a
  TmuRequest,      // addresses a to TMU `unit`
  TmuReceive,      // oldest result of TMU `unit`
  VpmReadSetup,    // word a; also DMA load setups. `constant` unused
  VpmWriteSetup,   // word a; also DMA store setups
  VpmRead, VpmWrite,
  DmaLoadStart, DmaStoreStart,  // address a
  DmaLoadWait, DmaStoreWait,
  SemaphoreAcquire, SemaphoreRelease,  // number `constant`
  MutexAcquire, MutexRelease,
  HostInterrupt
};

// Rules that both halves rely on.
// - A write of a vector register under a condition other than Always keeps the
//   old elements, so it reads the register too. Only Add, Mul, Move and Load
//   have conditions.
// - `setsFlags` without a target is a compare. Flags live from one operation that
//   sets them to the next and do not leave their block but through its exit. Under
//   a condition only the flags of the elements where it holds change.
// - Registers are not SSA: an operation may write a register that others wrote.
// - The order among these is kept: operations of one TMU; VpmReadSetup, VpmRead,
//   DmaLoadStart, DmaLoadWait; VpmWriteSetup, VpmWrite, DmaStoreStart,
//   DmaStoreWait; TmuRequest and DmaLoadStart against DmaStoreStart and
//   DmaStoreWait (they may touch the same memory); a semaphore, the mutex and
//   HostInterrupt against all of these. A request may go before a receive of
//   the same TMU only while at most 4 stay in flight.
struct Operation {
  static constexpr Vreg kNone = UINT32_MAX;

  Op op = Op::Move;
  isa::AddOp add = isa::AddOp::Nop;
  isa::MulOp mul = isa::MulOp::Nop;
  Vreg target = kNone;
  Operand a;
  Operand b;
  isa::Cond cond = isa::Cond::Always;
  bool setsFlags = false;
  std::uint32_t constant = 0;
  std::uint8_t unit = 0;
  std::uint32_t site = code::Object::kNoSite;
};

struct Block {
  enum class Exit : std::uint8_t { Jump, Branch, End };
  std::vector<Operation> operations;
  Exit exit = Exit::End;
  // Branch: to `taken` when `cond` holds for the flags as the block leaves them,
  // else to `next`. Jump: to `next`.
  isa::BranchCond cond = isa::BranchCond::Always;
  std::uint32_t taken = 0;
  std::uint32_t next = 0;
  std::uint32_t loopDepth = 0;
  std::uint32_t site = code::Object::kNoSite;  // of the exit
};

struct Function {
  std::string name;
  std::uint32_t parameters = 0;
  std::vector<code::Uniform> uniforms;  // one per Op::Uniform, in order
  Vreg registers = 0;                   // virtual registers are 0 .. registers - 1
  std::vector<Block> blocks;            // block 0 is the entry
  std::vector<code::Site> sites;
  bool usesTwoTmus = false;             // TMU_NOSWAP is set at the start
  // The source sets up VPM windows and DMA itself, so that no spill may come
  // between: running out of registers is then a CompileError.
  bool usesVpmByHand = false;
  // A VpmWriteSetup at the start serves VpmWrites in all blocks, so that no spill
  // may come between either.
  bool keepsWriteWindow = false;
  // Stores to neighbouring places are one, so that their vectors wait for each other:
  // with spills between, less would be gained than lost.
  bool mergesStores = false;
  // First of the VPM rows of each QPU that are free for spills: row =
  // spillRow + QPU number * spillRowStride; the QPU number comes from `qpuNumber`.
  std::uint32_t spillRow = 0;
  std::uint32_t spillRowStride = 0;
  Vreg qpuNumber = Operation::kNone;  // logical QPU number, there from the start on
};

}  // namespace qpu::compiler

#endif
