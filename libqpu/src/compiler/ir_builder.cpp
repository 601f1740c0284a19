#include "compiler/ir_builder.hpp"

#include <utility>

#include "compiler/fold.hpp"
#include "compiler/immediates.hpp"

namespace qpu::compiler {

using ir::Instruction;
using ir::Kind;
using ir::kNone;
using ir::Value;
using isa::AddOp;
using isa::MulOp;

namespace {

bool commutes(AddOp op) {
  switch (op) {
    case AddOp::Add:
    case AddOp::Min:
    case AddOp::Max:
    case AddOp::And:
    case AddOp::Or:
    case AddOp::Xor: return true;
    // Fadd is not commutative, because an infinite sum has the sign of the second operand.
    default: return false;
  }
}

Instruction make(Kind kind, Value a = kNone, Value b = kNone, std::uint32_t bits = 0) {
  Instruction i;
  i.kind = kind;
  i.a = a;
  i.b = b;
  i.bits = bits;
  return i;
}

}  // namespace

Value IrBuilder::append(Instruction i) {
  const auto v = static_cast<Value>(graph_.values.size());
  i.block = block_;
  i.site = site_;
  graph_.values.push_back(i);
  graph_.blocks[block_].body.push_back(v);
  return v;
}

Value IrBuilder::findOrAppend(const Instruction& i) {
  if (!simplify_) return append(i);
  const Key key{static_cast<std::uint64_t>(i.kind) | static_cast<std::uint64_t>(i.add) << 8U |
                    static_cast<std::uint64_t>(i.mul) << 16U |
                    static_cast<std::uint64_t>(i.test) << 24U |
                    static_cast<std::uint64_t>(i.bits) << 32U,
                static_cast<std::uint64_t>(i.a) << 32U | i.b, i.c};
  const auto [entry, isNew] = table_.try_emplace(key, kNone);
  if (!isNew) return entry->second;
  known_.push_back(key);
  const Value v = append(i);
  entry->second = v;
  return v;
}

void IrBuilder::forget(std::size_t mark) {
  for (; known_.size() > mark; known_.pop_back()) table_.erase(known_.back());
}

Value IrBuilder::constant(std::uint32_t bits) {
  const auto [entry, isNew] =
      constants_.try_emplace(bits, static_cast<Value>(graph_.values.size()));
  if (isNew) graph_.values.push_back(make(Kind::Constant, kNone, kNone, bits));
  return entry->second;
}

Value IrBuilder::element() { return findOrAppend(make(Kind::Element)); }

Value IrBuilder::folded(AddOp op, Value& a, Value& b) {
  if (commutes(op) && (of(a).kind == Kind::Constant || (of(b).kind != Kind::Constant && a > b)))
    std::swap(a, b);
  if (of(b).kind != Kind::Constant) {
    if (a == b) {
      if (op == AddOp::Sub || op == AddOp::Xor) return constant(0);
      if (op == AddOp::And || op == AddOp::Or || op == AddOp::Min || op == AddOp::Max) return a;
      if (op == AddOp::Not && of(a).kind == Kind::Alu && of(a).add == AddOp::Not) return of(a).a;
    }
    return kNone;
  }
  std::uint32_t y = of(b).bits;
  if (of(a).kind == Kind::Constant) {
    const auto result = fold(op, of(a).bits, y);
    return result ? constant(*result) : kNone;
  }
  if (isShift(op) && (y & 31U) == 0) return a;
  switch (op) {
    case AddOp::Sub: return alu(AddOp::Add, a, constant(0U - y));
    case AddOp::Add:
      if (y == 0) return a;
      if (of(a).kind == Kind::Alu && of(a).add == AddOp::Add &&
          of(of(a).b).kind == Kind::Constant)
        return alu(AddOp::Add, of(a).a, constant(of(of(a).b).bits + y));
      break;
    case AddOp::Or:
    case AddOp::Xor:
      if (y == 0) return a;
      break;
    case AddOp::And:
      if (y == 0) return b;
      if (y == UINT32_MAX) return a;
      break;
    case AddOp::Shl:
      if (y > 31) return alu(op, a, constant(y & 31U));
      if (of(a).kind == Kind::Alu && of(a).add == AddOp::Shl &&
          of(of(a).b).kind == Kind::Constant && of(of(a).b).bits + y < 32)
        return alu(op, of(a).a, constant(of(of(a).b).bits + y));
      break;
    default: break;
  }
  return kNone;
}

Value IrBuilder::folded(MulOp op, Value& a, Value& b) {
  if (of(a).kind == Kind::Constant || (of(b).kind != Kind::Constant && a > b)) std::swap(a, b);
  if (of(b).kind != Kind::Constant) return kNone;
  const std::uint32_t y = of(b).bits;
  if (of(a).kind == Kind::Constant) {
    const auto result = fold(op, of(a).bits, y);
    return result ? constant(*result) : kNone;
  }
  if (op == MulOp::Mul24 && (y & 0xffffffU) == 0) return constant(0);
  if (op == MulOp::FMul && (y & 0x7f800000U) == 0) return constant(0);
  // A left shift by at least 8 bits discards the upper 8 bits, which mul24 also ignores.
  if (op == MulOp::Mul24 && y < 1U << 24U && (y & (y - 1)) == 0)
    for (std::uint32_t n = 8; n < 24; ++n)
      if (y == 1U << n) return alu(AddOp::Shl, a, constant(n));
  return kNone;
}

Value IrBuilder::alu(AddOp op, Value a, Value b) {
  if (simplify_) {
    const Value known = folded(op, a, b);
    if (known != kNone) return known;
  }
  Instruction i = make(Kind::Alu, a, b);
  i.add = op;
  return findOrAppend(i);
}

Value IrBuilder::mul(MulOp op, Value a, Value b) {
  if (simplify_) {
    const Value known = folded(op, a, b);
    if (known != kNone) return known;
  }
  Instruction i = make(Kind::Mul, a, b);
  i.mul = op;
  return findOrAppend(i);
}

Value IrBuilder::rotate(Value a, Value amount) {
  if (of(amount).kind == Kind::Constant) {
    std::uint32_t n = of(amount).bits & 15U;
    if (simplify_) {
      if (of(a).kind == Kind::Rotate && of(of(a).b).kind == Kind::Constant) {
        n = (n + of(of(a).b).bits) & 15U;
        a = of(a).a;
      }
      if (n == 0 || of(a).kind == Kind::Constant || of(a).kind == Kind::Uniform) return a;
    }
    amount = constant(n);
  }
  return findOrAppend(make(Kind::Rotate, a, amount));
}

Value IrBuilder::broadcast(Value a, std::uint32_t element) {
  if (simplify_ && (of(a).kind == Kind::Constant || of(a).kind == Kind::Uniform ||
                    of(a).kind == Kind::Broadcast))
    return a;
  return findOrAppend(make(Kind::Broadcast, a, kNone, element));
}

Value IrBuilder::sfu(std::uint32_t function, Value a) {
  return findOrAppend(make(Kind::Sfu, a, kNone, function));
}

Value IrBuilder::select(Value mask, Value a, Value b) {
  if (simplify_) {
    if (a == b) return a;
    if (of(mask).kind == Kind::Constant) return of(mask).bits != 0 ? a : b;
  }
  Instruction i = make(Kind::Select, a, b);
  i.c = mask;
  return findOrAppend(i);
}

Value IrBuilder::compare(ir::Test test, Value a, Value b) {
  if (simplify_) {
    if (of(a).kind == Kind::Constant && of(b).kind == Kind::Constant)
      return constant(fold(test, of(a).bits, of(b).bits) ? UINT32_MAX : 0);
    if (a == b) return constant(test == ir::Test::Equal ? UINT32_MAX : 0);
    if (test == ir::Test::Equal && (of(a).kind == Kind::Constant || a > b) &&
        of(b).kind != Kind::Constant)
      std::swap(a, b);
  }
  Instruction i = make(Kind::Compare, a, b);
  i.test = test;
  return findOrAppend(i);
}

Value IrBuilder::maskAnd(Value a, Value b) {
  if (simplify_) {
    if (a == b) return a;
    if (of(a).kind == Kind::Constant) return of(a).bits != 0 ? b : a;
    if (of(b).kind == Kind::Constant) return of(b).bits != 0 ? a : b;
  }
  return findOrAppend(make(Kind::MaskAnd, a, b));
}

Value IrBuilder::maskOr(Value a, Value b) {
  if (simplify_) {
    if (a == b) return a;
    if (of(a).kind == Kind::Constant) return of(a).bits != 0 ? a : b;
    if (of(b).kind == Kind::Constant) return of(b).bits != 0 ? b : a;
  }
  return findOrAppend(make(Kind::MaskOr, a, b));
}

Value IrBuilder::maskNot(Value a) {
  if (simplify_) {
    if (of(a).kind == Kind::MaskNot) return of(a).a;
    if (of(a).kind == Kind::Constant) return constant(~of(a).bits);
  }
  return findOrAppend(make(Kind::MaskNot, a));
}

Value IrBuilder::load(Value address, std::uint8_t unit) {
  Instruction i = make(Kind::Load, address);
  i.unit = unit;
  return append(i);
}

Value IrBuilder::effect(Op op, Value a, std::uint32_t bits, std::uint8_t unit) {
  Instruction i = make(Kind::Effect, a, kNone, bits);
  i.op = op;
  i.unit = unit;
  return append(i);
}

Value IrBuilder::phi(std::uint32_t block) {
  Instruction i = make(Kind::Phi, kNone, kNone, static_cast<std::uint32_t>(graph_.phis.size()));
  i.block = block;
  i.site = site_;
  const auto v = static_cast<Value>(graph_.values.size());
  graph_.values.push_back(i);
  graph_.phis.emplace_back();
  graph_.blocks[block].phis.push_back(v);
  return v;
}

}  // namespace qpu::compiler
