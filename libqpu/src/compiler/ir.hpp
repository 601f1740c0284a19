// The front half's own form of a kernel: blocks of values in static single
// assignment. Control flow came from structured source, so loops are known and
// blocks are numbered in an order where definitions precede uses but for phis.
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
  Constant,   // bits; in no block
  Literal,    // bits, in a register from here on
  Uniform,    // bits: number of the uniform; in no block, there from the start
  Element,    // 0..15
  Alu,        // `add` of a, b
  Mul,        // `mul` of a, b
  Rotate,     // a up by b, of which element 0's low four bits count
  Broadcast,  // element `bits` of a
  Sfu,        // function `bits` of a
  Select,     // a where mask c holds, else b
  Compare,    // mask: `test` of a, b
  MaskAnd, MaskOr, MaskNot,
  Phi,        // bits: index into Graph::phis
  Load,       // 16 words from element 0 of a on, by TMU `unit`; becomes Effects
  Effect      // `op` of a, with `bits` and `unit`; kept in order
};

// Others are these with exchanged operands or under MaskNot. Floats are equal where neither
// is less.
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
  std::vector<std::uint32_t> preds;  // phis have one value for each
  Exit exit = Exit::End;
  // Branch: to `taken` when mask `condition` holds in any (all) elements, else
  // to `next`. Jump: to `next`.
  Value condition = kNone;
  bool all = false;
  std::uint32_t taken = kNone;
  std::uint32_t next = kNone;
  std::uint32_t loop = kNone;  // innermost
  std::uint32_t site = code::Object::kNoSite;
};

// Blocks header .. last; entered only from preheader, whose only way is the header.
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
  std::vector<Block> blocks;  // block 0 is the entry
  std::vector<Loop> loops;    // outer before inner
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
// Has no effect but its result, which depends on its operands alone.
inline bool isPure(const Instruction& i) {
  return i.kind != Kind::Effect && i.kind != Kind::Load && i.kind != Kind::Phi;
}

// Calls f(Value&) for each operand but those of phis.
template <typename I, typename F>
void forOperands(I& i, F f) {
  if (i.a != kNone) f(i.a);
  if (i.b != kNone) f(i.b);
  if (i.c != kNone) f(i.c);
}

}  // namespace qpu::compiler::ir

#endif
