#include "compiler/lower_conditions.hpp"

namespace qpu::compiler {

using detail::Expression;
using ir::Value;
using SourceOp = detail::Op;

void ConditionLowering::branch(std::uint32_t condition, std::uint32_t yes, std::uint32_t no, bool isLatch) {
  std::vector<Value> masks;
  evaluateMasks(condition, masks);
  isLatch_ = isLatch;
  auto next = masks.cbegin();
  branchOn(condition, next, yes, no);
}

// Computes all masks of a condition before its first branch.
void ConditionLowering::evaluateMasks(std::uint32_t id, std::vector<Value>& masks) {
  const Expression& e = c_.source.expressions[id];
  if (e.op == SourceOp::Any || e.op == SourceOp::All) {
    masks.push_back(expressions_.evaluate(e.a));
    return;
  }
  evaluateMasks(e.a, masks);
  if (e.op != SourceOp::MaskNot) evaluateMasks(e.b, masks);
}

void ConditionLowering::branchOn(std::uint32_t id, std::vector<Value>::const_iterator& mask, std::uint32_t yes,
              std::uint32_t no) {
  const Expression& e = c_.source.expressions[id];
  switch (e.op) {
    case SourceOp::MaskNot: return branchOn(e.a, mask, no, yes);
    case SourceOp::MaskAnd:
    case SourceOp::MaskOr: {
      const std::uint32_t second = blocks_.newBlock();
      if (e.op == SourceOp::MaskAnd)
        branchOn(e.a, mask, second, no);
      else
        branchOn(e.a, mask, yes, second);
      if (!blocks_.isReachable(second)) {
        skip(e.b, mask);
        return;
      }
      blocks_.place(second);
      return branchOn(e.b, mask, yes, no);
    }
    default: {
      const Value m = *mask++;
      if (c_.optimise && c_.graph.isConstant(m) && !isLatch_) {
        blocks_.jump(c_.graph.values[m].bits != 0 ? yes : no);
        return;
      }
      blocks_.branch(m, e.op == SourceOp::All, yes, no);
      return;
    }
  }
}

void ConditionLowering::skip(std::uint32_t id, std::vector<Value>::const_iterator& mask) const {
  const Expression& e = c_.source.expressions[id];
  if (e.op == SourceOp::Any || e.op == SourceOp::All) {
    ++mask;
    return;
  }
  skip(e.a, mask);
  if (e.op != SourceOp::MaskNot) skip(e.b, mask);
}

}  // namespace qpu::compiler
