// Machine operations on virtual registers: the interface between the compiler's front end and
// back end. One operation becomes one half of an instruction, or a short fixed sequence (Sfu,
// spills). The order within a basic block is a valid execution order, which the back end may
// change as far as the dependences allow.
#ifndef QPU_SRC_COMPILER_MIR_HPP
#define QPU_SRC_COMPILER_MIR_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "isa/instruction.hpp"

namespace qpu::compiler {

using Vreg = std::uint32_t;  // a vector of 16 words

// Source operand of an operation.
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
  LoadPerElement,  // `constant` in the per-element form, 0..3 for each element, such as index() & 3
  ElementNumber,   // 0..15
  Uniform,         // next word of the uniform stream; only at the start of the entry block, in order
  Rotate,          // a rotated up by b: an Immediate 1..15, or element 0 of a register
  Broadcast,       // element `constant` (0..15) of a in all elements
  Sfu,             // function `constant` = address::kSfuRecip.. of a
  TmuRequest,      // addresses a to TMU `unit`
  TmuReceive,      // the oldest result of TMU `unit`
  VpmReadSetup,    // word a; also DMA load setups. `constant` unused
  VpmWriteSetup,   // word a; also DMA store setups
  VpmRead, VpmWrite,
  DmaLoadStart, DmaStoreStart,  // address a
  DmaLoadWait, DmaStoreWait,
  SemaphoreAcquire, SemaphoreRelease,  // number `constant`
  MutexAcquire, MutexRelease,
  HostInterrupt
};

// Rules for machine operations:
// - A write under a condition other than Always keeps the other elements, so it also reads the register. Only Add, Mul,
//   Move and Load have conditions.
// - `setsFlags` without a target is a comparison. Flags are live until the next operation that sets them. They are not
//   live across blocks; only the branch at the end of the block reads them. Under a condition, only the flags of the
//   elements for which it holds change.
// - Registers are not in SSA form: several operations may write the same register.
// - These operations stay in order among each other:
//   - operations of one TMU;
//   - VpmReadSetup, VpmRead, DmaLoadStart and DmaLoadWait;
//   - VpmWriteSetup, VpmWrite, DmaStoreStart and DmaStoreWait;
//   - TmuRequest and DmaLoadStart relative to DmaStoreStart and DmaStoreWait, which may access the same memory;
//   - operations on a semaphore or the mutex, and HostInterrupt, relative to all of these.
//   A request may move before a receive of the same TMU only if at most 4 requests stay in flight.
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
  // Branch: to `taken` if `cond` holds for the flags at the end of the block, otherwise to
  // `next`. Jump: to `next`.
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
  bool usesTwoTmus = false;             // sets TMU_NOSWAP at the start
  // The source sets up VPM windows and DMA itself, so vectors cannot be spilled to memory, and
  // running out of registers is a CompileError.
  bool usesVpmByHand = false;
  // One VpmWriteSetup at the start serves the VpmWrites in all blocks; this, too, rules out
  // spilling to memory.
  bool keepsWriteWindow = false;
  // Stores to adjacent addresses are merged, so their vectors are live longer. Merging is not
  // worthwhile if this causes spills.
  bool mergesStores = false;
  // VPM row for spills: spillRow + QPU number * spillRowStride.
  std::uint32_t spillRow = 0;
  std::uint32_t spillRowStride = 0;
  Vreg qpuNumber = Operation::kNone;  // logical QPU number, available from the start
};

}  // namespace qpu::compiler

#endif
