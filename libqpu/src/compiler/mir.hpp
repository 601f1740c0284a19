// Machine operations on virtual registers: the interface between the compiler's front end and back
// end. An operation becomes one half of an instruction, or a short fixed sequence of instructions
// (Sfu, spills). The operations of a basic block are in a valid execution order. The back end may
// reorder them as long as it preserves all dependences.
#ifndef QPU_SRC_COMPILER_MIR_HPP
#define QPU_SRC_COMPILER_MIR_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "isa/instruction.hpp"

namespace qpu::compiler {

using Vreg = std::uint32_t;  // register for a vector of 16 words

// A source operand.
struct Operand {
  enum class Kind : std::uint8_t {
    None,
    Register,   // `value` is the number of the Vreg
    Immediate   // `value` is a 32-bit constant that can be encoded as a small immediate
  };
  Kind kind = Kind::None;
  std::uint32_t value = 0;

  static Operand reg(Vreg v) { return {Kind::Register, v}; }
  static Operand imm(std::uint32_t bits) { return {Kind::Immediate, bits}; }
  bool isRegister() const { return kind == Kind::Register; }
};

enum class Op : std::uint8_t {
  Add,             // operation `add` of the ADD pipe on operands a and b
  Mul,             // operation `mul` of the MUL pipe on operands a and b
  Move,            // copies operand a, which may be an Immediate, through either pipe
  Load,            // the 32-bit word `constant`
  LoadPerElement,  // `constant` in the per-element form, which gives each element a number 0..3, such as index() & 3
  ElementNumber,   // the element numbers 0..15
  Uniform,         // the next word of the uniform stream; allowed only at the start of the entry block, in order
  Rotate,          // operand a, rotated to higher element numbers by b (an Immediate 1..15 or element 0 of a register)
  Broadcast,       // element number `constant` (0..15) of operand a, copied to all elements
  Sfu,             // the special function with address `constant` (kSfuRecip..kSfuLog) of operand a
  TmuRequest,      // sends the addresses in operand a to TMU `unit`
  TmuReceive,      // the oldest result from TMU `unit`
  VpmReadSetup,    // writes operand a as a setup word, also for DMA loads; `constant` is unused
  VpmWriteSetup,   // writes operand a as a setup word, also for DMA stores
  VpmRead, VpmWrite,
  DmaLoadStart, DmaStoreStart,  // start a transfer at the address in operand a
  DmaLoadWait, DmaStoreWait,
  SemaphoreAcquire, SemaphoreRelease,  // use the semaphore with the number `constant`
  MutexAcquire, MutexRelease,
  HostInterrupt
};

// Rules for machine operations:
// - An operation under a condition other than Always changes only the elements where the
//   condition holds. A conditional operation therefore also reads its target register. Only Add,
//   Mul, Move and Load can have conditions.
// - An operation that has `setsFlags` but no target is a comparison. Flags are live until the next
//   operation that sets them. Flags are not live across blocks. The last operation that can read
//   the flags is the branch at the end of the block. An operation under a condition sets the flags
//   of only those elements where the condition holds.
// - Registers are not in SSA form, so several operations may write the same register.
// - The operations in each of these groups keep their order:
//   - the operations of one TMU;
//   - VpmReadSetup, VpmRead, DmaLoadStart and DmaLoadWait;
//   - VpmWriteSetup, VpmWrite, DmaStoreStart and DmaStoreWait.
// - TmuRequest and DmaLoadStart are not reordered with DmaStoreStart and DmaStoreWait, because
//   they may access the same memory. For the same reason, DmaStoreStart is not moved before a
//   DmaLoadWait.
// - Operations on a semaphore or the mutex, and HostInterrupt, are not reordered with any
//   operation named above.
// - A request may be moved before a receive from the same TMU only if at most 4 requests are then
//   in flight.
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
  // A Branch leads to `taken` if `cond` holds for the flags at the end of the block, and to
  // `next` otherwise. A Jump leads to `next`.
  isa::BranchCond cond = isa::BranchCond::Always;
  std::uint32_t taken = 0;
  std::uint32_t next = 0;
  std::uint32_t loopDepth = 0;
  std::uint32_t site = code::Object::kNoSite;  // the source construct that the exit belongs to
};

struct Function {
  std::string name;
  std::uint32_t parameters = 0;
  std::vector<code::Uniform> uniforms;  // one for each Op::Uniform, in the same order
  Vreg registers = 0;                   // the number of virtual registers, which are numbered from 0
  std::vector<Block> blocks;            // block 0 is the entry block
  std::vector<code::Site> sites;
  bool usesTwoTmus = false;             // if true, TMU_NOSWAP is set at the start
  // The source sets up VPM windows and DMA itself. Vectors therefore cannot be spilled to memory,
  // and the compiler throws CompileError if it runs out of registers.
  bool usesVpmByHand = false;
  // A single VpmWriteSetup at the start of the kernel applies to the VpmWrites in all blocks.
  // Vectors therefore cannot be spilled to memory.
  bool keepsWriteWindow = false;
  // Stores to adjacent addresses are merged, which makes the live ranges of the stored vectors
  // longer. Merging is not worthwhile if it causes spills.
  bool mergesStores = false;
  // The VPM row that a QPU uses for spills is spillRow + QPU number * spillRowStride.
  std::uint32_t spillRow = 0;
  std::uint32_t spillRowStride = 0;
  Vreg qpuNumber = Operation::kNone;  // register for the logical QPU number, which is available from the start
};

}  // namespace qpu::compiler

#endif
