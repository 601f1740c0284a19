// Determines which constants an operation can encode as immediates and which constants need a
// register.
#ifndef QPU_SRC_COMPILER_IMMEDIATES_HPP
#define QPU_SRC_COMPILER_IMMEDIATES_HPP

#include <cstdint>

#include "compiler/ir.hpp"
#include "isa/instruction.hpp"

namespace qpu::compiler {

inline bool isImmediate(std::uint32_t bits) { return isa::smallImmediateCode(bits).has_value(); }

inline bool isShift(isa::AddOp op) {
  return op == isa::AddOp::Shl || op == isa::AddOp::Shr || op == isa::AddOp::Asr ||
         op == isa::AddOp::Ror;
}

// An operation with the constant operand b, rewritten so that b is an immediate if possible.
struct WithConstant {
  isa::AddOp op;
  std::uint32_t bits;
};
inline WithConstant withConstant(isa::AddOp op, std::uint32_t bits) {
  if (isShift(op)) {
    bits &= 31U;
    if (bits > 15) bits -= 32;  // a shift uses only the low five bits, which stay the same
  } else if (op == isa::AddOp::Add && !isImmediate(bits) && isImmediate(0U - bits)) {
    op = isa::AddOp::Sub;
    bits = 0U - bits;
  }
  return {op, bits};
}

// Calls f(Value&) for each operand that is a constant and must be in a register.
template <typename F>
void forConstantsInRegisters(const ir::Graph& graph, ir::Instruction& i, F f) {
  using ir::Kind;
  const auto needs = [&](ir::Value v) {
    return v != ir::kNone && graph.isConstant(v) && !isImmediate(graph.values[v].bits);
  };
  switch (i.kind) {
    case Kind::Alu:
    case Kind::Mul:
    case Kind::Compare: {
      const bool a = graph.isConstant(i.a);
      const bool b = i.b != ir::kNone && graph.isConstant(i.b);
      if (i.kind == Kind::Alu && b && !a) {
        if (!isImmediate(withConstant(i.add, graph.values[i.b].bits).bits)) f(i.b);
        return;
      }
      const bool two = a && b && !needs(i.b) && graph.values[i.a].bits != graph.values[i.b].bits;
      if (needs(i.a) || two) f(i.a);
      if (needs(i.b)) f(i.b);
      return;
    }
    case Kind::Effect:
      if (needs(i.a)) f(i.a);
      return;
    case Kind::Rotate:
    case Kind::Broadcast:
    case Kind::Sfu:
      if (graph.isConstant(i.a)) f(i.a);
      return;
    default: return;
  }
}

}  // namespace qpu::compiler

#endif
