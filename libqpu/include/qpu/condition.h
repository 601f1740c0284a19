// Comparisons, and conditions that combine them.
#ifndef QPU_CONDITION_H
#define QPU_CONDITION_H

#include "qpu/vector.h"

namespace qpu {

// A vector of 16 booleans, one for each element.
class BoolExpr {
 public:
  explicit BoolExpr(detail::FromNode n) : node_(n.node) {}
  detail::Node node() const { return node_; }

 private:
  detail::Node node_;
};

// A single boolean for the whole vector. If, While and For branch on a Cond.
class Cond {
 public:
  explicit Cond(detail::FromNode n) : node_(n.node) {}
  // Converts a comparison to a condition, as any() does, so that `For (Int i = 0, i < n, ...)` is
  // valid.
  Cond(const BoolExpr& b)
      : node_(detail::unary(detail::Op::Any, detail::Type::Scalar, b.node())) {}
  detail::Node node() const { return node_; }

 private:
  detail::Node node_;
};

namespace detail {

inline BoolExpr compare(Op op, const IntExpr& a, const IntExpr& b) {
  return BoolExpr(FromNode(binary(op, Type::Mask, a.node(), b.node())));
}
inline BoolExpr compare(Op op, const FloatExpr& a, const FloatExpr& b) {
  return BoolExpr(FromNode(binary(op, Type::Mask, a.node(), b.node())));
}

}  // namespace detail

// Comparisons of integers are signed.
inline BoolExpr operator==(const IntExpr& a, const IntExpr& b) {
  return detail::compare(detail::Op::Eq, a, b);
}
inline BoolExpr operator!=(const IntExpr& a, const IntExpr& b) {
  return detail::compare(detail::Op::Ne, a, b);
}
inline BoolExpr operator<(const IntExpr& a, const IntExpr& b) {
  return detail::compare(detail::Op::Lt, a, b);
}
inline BoolExpr operator<=(const IntExpr& a, const IntExpr& b) {
  return detail::compare(detail::Op::Le, a, b);
}
inline BoolExpr operator>(const IntExpr& a, const IntExpr& b) {
  return detail::compare(detail::Op::Gt, a, b);
}
inline BoolExpr operator>=(const IntExpr& a, const IntExpr& b) {
  return detail::compare(detail::Op::Ge, a, b);
}

// Floats are compared by the sign and magnitude of their bits. -0 equals +0, and denormals are not
// treated as 0. A positive NaN is greater than +Inf, and a negative NaN is less than -Inf. A NaN
// equals only a NaN with the same bits.
inline BoolExpr operator==(const FloatExpr& a, const FloatExpr& b) {
  return detail::compare(detail::Op::FEq, a, b);
}
inline BoolExpr operator!=(const FloatExpr& a, const FloatExpr& b) {
  return detail::compare(detail::Op::FNe, a, b);
}
inline BoolExpr operator<(const FloatExpr& a, const FloatExpr& b) {
  return detail::compare(detail::Op::FLt, a, b);
}
inline BoolExpr operator<=(const FloatExpr& a, const FloatExpr& b) {
  return detail::compare(detail::Op::FLe, a, b);
}
inline BoolExpr operator>(const FloatExpr& a, const FloatExpr& b) {
  return detail::compare(detail::Op::FGt, a, b);
}
inline BoolExpr operator>=(const FloatExpr& a, const FloatExpr& b) {
  return detail::compare(detail::Op::FGe, a, b);
}

// The logical operators always evaluate both operands.
inline BoolExpr operator&&(const BoolExpr& a, const BoolExpr& b) {
  return BoolExpr(
      detail::FromNode(detail::binary(detail::Op::MaskAnd, detail::Type::Mask, a.node(), b.node())));
}
inline BoolExpr operator||(const BoolExpr& a, const BoolExpr& b) {
  return BoolExpr(
      detail::FromNode(detail::binary(detail::Op::MaskOr, detail::Type::Mask, a.node(), b.node())));
}
inline BoolExpr operator!(const BoolExpr& a) {
  return BoolExpr(
      detail::FromNode(detail::unary(detail::Op::MaskNot, detail::Type::Mask, a.node())));
}
inline Cond operator&&(const Cond& a, const Cond& b) {
  return Cond(detail::FromNode(
      detail::binary(detail::Op::MaskAnd, detail::Type::Scalar, a.node(), b.node())));
}
inline Cond operator||(const Cond& a, const Cond& b) {
  return Cond(detail::FromNode(
      detail::binary(detail::Op::MaskOr, detail::Type::Scalar, a.node(), b.node())));
}
inline Cond operator!(const Cond& a) {
  return Cond(
      detail::FromNode(detail::unary(detail::Op::MaskNot, detail::Type::Scalar, a.node())));
}

// any(b) is true if b is true for at least one element. all(b) is true if b is true for all
// elements.
inline Cond any(const BoolExpr& b) { return b; }
inline Cond all(const BoolExpr& b) {
  return Cond(detail::FromNode(detail::unary(detail::Op::All, detail::Type::Scalar, b.node())));
}

}  // namespace qpu

#endif
