#include "compiler/select_operations.hpp"

#include "compiler/immediates.hpp"

namespace qpu::compiler {

using ir::Value;
using isa::AddOp;
using isa::Cond;

Operation& OperationWriter::emit(Op op, Vreg target) {
  Operation o;
  o.op = op;
  o.target = target;
  o.site = site_;
  out_->push_back(o);
  return out_->back();
}

Operation& OperationWriter::emitAdd(AddOp op, Vreg target, Operand a, Operand b) {
  Operation& o = emit(Op::Add, target);
  o.add = op;
  o.a = a;
  o.b = b;
  return o;
}

void OperationWriter::load(Vreg target, std::uint32_t bits, Cond cond) {
  if (isImmediate(bits)) {
    Operation& o = emit(Op::Move, target);
    o.a = Operand::imm(bits);
    o.cond = cond;
  } else {
    Operation& o = emit(Op::Load, target);
    o.constant = bits;
    o.cond = cond;
  }
}

void OperationWriter::move(Vreg target, Value from, Cond cond) {
  if (graph_.isConstant(from)) return load(target, graph_.values[from].bits, cond);
  Operation& o = emit(Op::Move, target);
  o.a = Operand::reg(from);
  o.cond = cond;
}

Operand OperationWriter::inRegister(Value v) {
  if (!graph_.isConstant(v)) return Operand::reg(v);
  const std::uint32_t bits = graph_.values[v].bits;
  const auto [entry, isNew] = constants_.try_emplace(bits, registers_);
  if (isNew) load(registers_++, bits);
  return Operand::reg(entry->second);
}

Operand OperationWriter::operand(Value v) {
  if (graph_.isConstant(v) && isImmediate(graph_.values[v].bits))
    return Operand::imm(graph_.values[v].bits);
  return inRegister(v);
}

std::pair<Operand, Operand> OperationWriter::operands(Value a, Value b) {
  const Operand y = operand(b);
  const bool same = a == b || !graph_.isConstant(a) || !graph_.isConstant(b) ||
                    graph_.values[a].bits == graph_.values[b].bits;
  return {y.isRegister() || same ? operand(a) : inRegister(a), y};
}

}  // namespace qpu::compiler
