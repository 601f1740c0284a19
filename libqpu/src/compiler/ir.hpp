// The front end's intermediate representation: basic blocks of values in static single assignment
// (SSA) form. Reference: Ron Cytron, Jeanne Ferrante, Barry K. Rosen, Mark N. Wegman and F. Kenneth
// Zadeck, "Efficiently Computing Static Single Assignment Form and the Control Dependence Graph",
// 1991.
//
// The source is structured, so all loops are known. Blocks are numbered so that each definition
// precedes its uses. Only phi arguments can be defined after they are used.
#ifndef QPU_SRC_COMPILER_IR_HPP
#define QPU_SRC_COMPILER_IR_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "compiler/mir.hpp"

namespace qpu::compiler::ir {

using Value = std::uint32_t;
constexpr Value kNone = UINT32_MAX;

enum class Kind : std::uint8_t {
  Constant,   // the constant `bits`; belongs to no block
  Literal,    // the constant `bits`, loaded into a register
  Uniform,    // uniform number `bits`; belongs to no block, available from the start
  Element,    // the element numbers 0..15
  Alu,        // operation `add` of the ADD pipe on operands a and b
  Mul,        // operation `mul` of the MUL pipe on operands a and b
  Rotate,     // operand a, rotated to higher element numbers by the low four bits of element 0 of b
  Broadcast,  // element number `bits` of operand a, copied to all elements
  Sfu,        // the special function with address `bits`, applied to operand a
  Select,     // operand a where mask c is true, and operand b elsewhere
  Compare,    // a mask: the result of `test` on operands a and b
  MaskAnd, MaskOr, MaskNot,
  Phi,        // `bits` is the phi's index in Graph::phis
  Load,       // 16 words from the address in element 0 of a, through TMU `unit`; lowered to Effects
  Effect      // `op` on operand a, with `bits` and `unit`; effects stay in order
};

// The other comparisons are expressed with exchanged operands or with MaskNot. Two floats are equal
// if neither is less than the other.
enum class Test : std::uint8_t { Equal, Less, FloatLess };

struct Instruction {
  Kind kind = Kind::Constant;
  isa::AddOp add = isa::AddOp::Nop;
  isa::MulOp mul = isa::MulOp::Nop;
  Test test = Test::Equal;
  Op op = Op::Move;
  std::uint8_t unit = 0;
  Value a = kNone;
  Value b = kNone;
  Value c = kNone;
  std::uint32_t bits = 0;
  std::uint32_t block = kNone;
  std::uint32_t site = code::Object::kNoSite;
};

struct Block {
  enum class Exit : std::uint8_t { Jump, Branch, End };
  std::vector<Value> phis;
  std::vector<Value> body;
  std::vector<std::uint32_t> preds;  // predecessors; a phi has one argument for each of them
  Exit exit = Exit::End;
  // A Branch leads to `taken` if mask `condition` holds in any element (or, if `all` is set, in
  // all elements), and to `next` otherwise. A Jump leads to `next`.
  Value condition = kNone;
  bool all = false;
  std::uint32_t taken = kNone;
  std::uint32_t next = kNone;
  std::uint32_t loop = kNone;  // the innermost loop that contains the block
  std::uint32_t site = code::Object::kNoSite;
};

// A loop consists of the blocks from `header` to `last`. Control enters a loop only from its
// preheader, whose only successor is the header.
struct Loop {
  std::uint32_t parent = kNone;
  std::uint32_t depth = 1;
  std::uint32_t preheader = kNone;
  std::uint32_t header = kNone;
  std::uint32_t last = kNone;
};

struct Graph {
  std::string name;
  std::uint32_t parameters = 0;
  std::vector<Instruction> values;
  std::vector<Block> blocks;  // block 0 is the entry block
  std::vector<Loop> loops;    // each loop precedes the loops that it contains
  std::vector<std::vector<Value>> phis;
  std::vector<code::Uniform> uniforms;
  std::vector<code::Site> sites;
  Value qpuNumber = kNone;
  bool usesTwoTmus = false;
  bool usesVpmByHand = false;
  bool keepsWriteWindow = false;
  bool mergesStores = false;
  std::uint32_t spillRow = 0;
  std::uint32_t spillRowStride = 0;

  bool isConstant(Value v) const { return values[v].kind == Kind::Constant; }
  bool isConstant(Value v, std::uint32_t bits) const {
    return isConstant(v) && values[v].bits == bits;
  }
  std::vector<Value>& arguments(Value phi) { return phis[values[phi].bits]; }
  const std::vector<Value>& arguments(Value phi) const { return phis[values[phi].bits]; }
  std::uint32_t depth(std::uint32_t block) const {
    return blocks[block].loop == kNone ? 0 : loops[blocks[block].loop].depth;
  }
};

inline bool isMask(Kind k) {
  return k == Kind::Compare || k == Kind::MaskAnd || k == Kind::MaskOr || k == Kind::MaskNot;
}
inline bool hasResult(const Instruction& i) {
  return i.kind != Kind::Effect || i.op == Op::TmuReceive || i.op == Op::VpmRead;
}
// Returns true if the instruction is pure. The result of a pure instruction depends only on its
// operands, and the instruction has no side effects.
inline bool isPure(const Instruction& i) {
  return i.kind != Kind::Effect && i.kind != Kind::Load && i.kind != Kind::Phi;
}

// Calls f(Value&) for each operand. Does not visit phi arguments.
template <typename I, typename F>
void forOperands(I& i, F f) {
  if (i.a != kNone) f(i.a);
  if (i.b != kNone) f(i.b);
  if (i.c != kNone) f(i.c);
}

}  // namespace qpu::compiler::ir

#endif
