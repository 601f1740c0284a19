#include "compiler/lower_expressions.hpp"

namespace qpu::compiler {

using detail::Expression;
using ir::kNone;
using ir::Value;
using isa::AddOp;
using isa::MulOp;
using SourceOp = detail::Op;

Value ExpressionLowering::evaluate(std::uint32_t id) {
  const Expression& e = c_.source.expressions[id];
  switch (e.op) {
    case SourceOp::Constant: return c_.builder.constant(e.bits);
    case SourceOp::Variable: return c_.environment[e.bits];
    case SourceOp::ElementNumber: return c_.builder.element();
    case SourceOp::QpuNumber: return c_.graph.qpuNumber;
    case SourceOp::QpuCount: return c_.qpuCount;
    default: break;
  }
  if (e.vpmReads == 0 && computedIn_[id] == serial_) return valueOf_[id];
  const Value v = compute(e);
  computedIn_[id] = serial_;
  valueOf_[id] = v;
  return v;
}

Value ExpressionLowering::alu(AddOp op, const Expression& e) {
  const Value a = evaluate(e.a);
  return c_.builder.alu(op, a, evaluate(e.b));
}

Value ExpressionLowering::aluOfOne(AddOp op, const Expression& e) { return c_.builder.alu(op, evaluate(e.a)); }

Value ExpressionLowering::mul(MulOp op, const Expression& e) {
  const Value a = evaluate(e.a);
  return c_.builder.mul(op, a, evaluate(e.b));
}

Value ExpressionLowering::compare(ir::Test test, const Expression& e, bool swap, bool negate) {
  const Value a = evaluate(e.a);
  const Value b = evaluate(e.b);
  const Value mask = swap ? c_.builder.compare(test, b, a) : c_.builder.compare(test, a, b);
  return negate ? c_.builder.maskNot(mask) : mask;
}

Value ExpressionLowering::differ(const Expression& e) {
  const Value less = compare(ir::Test::FloatLess, e, false, false);
  return c_.builder.maskOr(less, compare(ir::Test::FloatLess, e, true, false));
}

Value ExpressionLowering::compute(const Expression& e) {
  using ir::Test;
  switch (e.op) {
    case SourceOp::Add: return alu(AddOp::Add, e);
    case SourceOp::Sub: return alu(AddOp::Sub, e);
    case SourceOp::Mul24: return mul(MulOp::Mul24, e);
    case SourceOp::Min: return alu(AddOp::Min, e);
    case SourceOp::Max: return alu(AddOp::Max, e);
    case SourceOp::Shl: return alu(AddOp::Shl, e);
    case SourceOp::Asr: return alu(AddOp::Asr, e);
    case SourceOp::Shr: return alu(AddOp::Shr, e);
    case SourceOp::Ror: return alu(AddOp::Ror, e);
    case SourceOp::And: return alu(AddOp::And, e);
    case SourceOp::Or: return alu(AddOp::Or, e);
    case SourceOp::Xor: return alu(AddOp::Xor, e);
    case SourceOp::Not: return aluOfOne(AddOp::Not, e);
    case SourceOp::FAdd: return alu(AddOp::FAdd, e);
    case SourceOp::FSub: return alu(AddOp::FSub, e);
    case SourceOp::FMul: return mul(MulOp::FMul, e);
    case SourceOp::FMin: return alu(AddOp::FMin, e);
    case SourceOp::FMax: return alu(AddOp::FMax, e);
    case SourceOp::FMaxAbs: return alu(AddOp::FMaxAbs, e);
    case SourceOp::ItoF: return aluOfOne(AddOp::ItoF, e);
    case SourceOp::FtoI: return aluOfOne(AddOp::FtoI, e);
    case SourceOp::Recip: return c_.builder.sfu(isa::address::kSfuRecip, evaluate(e.a));
    case SourceOp::RecipSqrt: return c_.builder.sfu(isa::address::kSfuRecipSqrt, evaluate(e.a));
    case SourceOp::Exp2: return c_.builder.sfu(isa::address::kSfuExp, evaluate(e.a));
    case SourceOp::Log2: return c_.builder.sfu(isa::address::kSfuLog, evaluate(e.a));
    case SourceOp::Rotate: {
      const Value a = evaluate(e.a);
      return c_.builder.rotate(a, evaluate(e.b));
    }
    case SourceOp::Broadcast:
      return c_.builder.broadcast(evaluate(e.a), c_.source.expressions[e.b].bits & 15U);
    case SourceOp::Load: return memory_.load(*statement_, evaluate(e.a));
    case SourceOp::VpmRead: return c_.builder.effect(Op::VpmRead);
    case SourceOp::Eq: return compare(Test::Equal, e, false, false);
    case SourceOp::Ne: return compare(Test::Equal, e, false, true);
    case SourceOp::Lt: return compare(Test::Less, e, false, false);
    case SourceOp::Ge: return compare(Test::Less, e, false, true);
    case SourceOp::Gt: return compare(Test::Less, e, true, false);
    case SourceOp::Le: return compare(Test::Less, e, true, true);
    case SourceOp::FEq: return c_.builder.maskNot(differ(e));
    case SourceOp::FNe: return differ(e);
    case SourceOp::FLt: return compare(Test::FloatLess, e, false, false);
    case SourceOp::FGe: return compare(Test::FloatLess, e, false, true);
    case SourceOp::FGt: return compare(Test::FloatLess, e, true, false);
    case SourceOp::FLe: return compare(Test::FloatLess, e, true, true);
    case SourceOp::MaskAnd: {
      const Value a = evaluate(e.a);
      return c_.builder.maskAnd(a, evaluate(e.b));
    }
    case SourceOp::MaskOr: {
      const Value a = evaluate(e.a);
      return c_.builder.maskOr(a, evaluate(e.b));
    }
    case SourceOp::MaskNot: return c_.builder.maskNot(evaluate(e.a));
    // evaluate() handles the leaves, and branchOn() handles scalars.
    case SourceOp::Constant:
    case SourceOp::Variable:
    case SourceOp::ElementNumber:
    case SourceOp::QpuNumber:
    case SourceOp::QpuCount:
    case SourceOp::Any:
    case SourceOp::All: break;
  }
  return c_.builder.constant(0);
}

}  // namespace qpu::compiler
