// The vector types of the kernel language: Int, Float and Ptr<T>. Each vector holds 16 elements of
// 32 bits. A kernel function that uses these types records a program when it runs.
#ifndef QPU_VECTOR_H
#define QPU_VECTOR_H

#include <cstdint>
#include <type_traits>

#include "qpu/detail/builder.h"
#include "qpu/location.h"

namespace qpu {

class Int;
class Float;
template <typename T>
class Ptr;

namespace detail {

// A constructor tag. Only the library and the classes below create expressions from nodes.
struct FromNode {
  Node node;
  explicit FromNode(Node n) : node(n) {}
};

template <typename A>
struct IfNumber : std::enable_if<std::is_arithmetic<A>::value, int> {};
template <typename A>
struct IfInteger : std::enable_if<std::is_integral<A>::value, int> {};
template <typename A>
struct IfReal : std::enable_if<std::is_floating_point<A>::value, int> {};

}  // namespace detail

namespace detail {

// A double represents every 32-bit integer exactly. Integers that do not fit into 32 bits remain
// out of range when they are converted to double.
template <typename A>
typename std::enable_if<std::is_integral<A>::value && sizeof(A) <= 4, Node>::type number(A value) {
  return constantInt(static_cast<std::int32_t>(value));
}
template <typename A>
typename std::enable_if<!std::is_integral<A>::value || (sizeof(A) > 4), Node>::type number(
    A value) {
  return constantIntOf(static_cast<double>(value));
}

}  // namespace detail

// An integer vector value. A C++ number is truncated toward zero and copied to all elements. The
// number must be in the range -2^31..2^32 - 1. A number of 2^31 or more becomes the negative number
// with the same 32 bits.
class IntExpr {
 public:
  explicit IntExpr(detail::FromNode n) : node_(n.node) {}
  template <typename A, typename detail::IfNumber<A>::type = 0>
  IntExpr(A value) : node_(detail::number(value)) {}

  detail::Node node() const { return node_; }

 private:
  detail::Node node_;
};

// A floating-point vector value.
class FloatExpr {
 public:
  explicit FloatExpr(detail::FromNode n) : node_(n.node) {}
  template <typename A, typename detail::IfNumber<A>::type = 0>
  FloatExpr(A value) : node_(detail::constantFloat(static_cast<float>(value))) {}

  detail::Node node() const { return node_; }

 private:
  detail::Node node_;
};

// A vector of 16 bus addresses of elements of type T.
template <typename T>
class PtrExpr;

namespace detail {

template <typename T>
struct Element;
template <>
struct Element<Int> {
  typedef IntExpr Expr;
  static Type type() { return Type::Int; }
};
template <>
struct Element<Float> {
  typedef FloatExpr Expr;
  static Type type() { return Type::Float; }
};
template <typename T>
struct Element<Ptr<T> > {
  typedef PtrExpr<T> Expr;
  static Type type() { return Type::Address; }
};

}  // namespace detail

// The expressions *p and p[i]. Reading *p loads 16 consecutive words, starting at the first address
// in p. Assigning to *p stores 16 words, starting at the same address, and waits until they are
// written.
template <typename T>
class Deref : public detail::Element<T>::Expr {
  typedef typename detail::Element<T>::Expr Expr;

 public:
  explicit Deref(detail::Node address)
      : Expr(detail::FromNode(detail::load(address, detail::Element<T>::type()))),
        address_(address) {}
  Deref(const Deref&) = default;

  void operator=(const Expr& value) const {
    detail::store(value.node(), address_, true, Location());
  }
  void operator=(const Deref& value) const {
    detail::store(value.node(), address_, true, Location());
  }
  template <typename A, typename detail::IfNumber<A>::type = 0>
  void operator=(A value) const {
    *this = Expr(value);
  }

 private:
  detail::Node address_;
};

template <typename T>
class PtrExpr {
 public:
  explicit PtrExpr(detail::FromNode n) : node_(n.node) {}

  detail::Node node() const { return node_; }

  Deref<T> operator*() const { return Deref<T>(node_); }
  // The index i is a number of elements, not bytes: p[16] is the vector that follows p[0].
  Deref<T> operator[](const IntExpr& i) const;

 private:
  detail::Node node_;
};

namespace detail {

inline IntExpr intOp(Op op, const IntExpr& a, const IntExpr& b) {
  return IntExpr(FromNode(binary(op, Type::Int, a.node(), b.node())));
}
inline FloatExpr floatOp(Op op, const FloatExpr& a, const FloatExpr& b) {
  return FloatExpr(FromNode(binary(op, Type::Float, a.node(), b.node())));
}
inline FloatExpr floatOp(Op op, const FloatExpr& a) {
  return FloatExpr(FromNode(unary(op, Type::Float, a.node())));
}
template <typename T>
PtrExpr<T> offset(Op op, const PtrExpr<T>& p, const IntExpr& i) {
  const Node bytes = binary(Op::Shl, Type::Int, i.node(), constantInt(2));
  return PtrExpr<T>(FromNode(binary(op, Type::Address, p.node(), bytes)));
}

}  // namespace detail

// Arithmetic on Int. Sums and differences wrap at 32 bits. Multiplication (mul24) treats the low 24
// bits of each operand as an unsigned number and keeps the low 32 bits of the product. The shift
// amount is in bits 4:0 of the right operand, and >> keeps the sign. See the manual, section 3, ALU
// instructions.
inline IntExpr operator+(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Add, a, b);
}
inline IntExpr operator-(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Sub, a, b);
}
inline IntExpr operator-(const IntExpr& a) { return detail::intOp(detail::Op::Sub, 0, a); }
inline IntExpr operator*(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Mul24, a, b);
}
inline IntExpr mul24(const IntExpr& a, const IntExpr& b) { return a * b; }
inline IntExpr operator<<(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Shl, a, b);
}
inline IntExpr operator>>(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Asr, a, b);
}
inline IntExpr operator&(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::And, a, b);
}
inline IntExpr operator|(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Or, a, b);
}
inline IntExpr operator^(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Xor, a, b);
}
inline IntExpr operator~(const IntExpr& a) {
  return IntExpr(detail::FromNode(detail::unary(detail::Op::Not, detail::Type::Int, a.node())));
}
inline IntExpr min(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Min, a, b);
}
inline IntExpr max(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Max, a, b);
}
// Logical shift right, and rotation of the 32 bits in each element.
inline IntExpr shr(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Shr, a, b);
}
inline IntExpr ror(const IntExpr& a, const IntExpr& b) {
  return detail::intOp(detail::Op::Ror, a, b);
}

// Arithmetic on Float. Results are rounded toward zero and are never denormal. Denormal operands
// are treated as +0. No operation produces NaN. min and max compare operands by sign and magnitude.
inline FloatExpr operator+(const FloatExpr& a, const FloatExpr& b) {
  return detail::floatOp(detail::Op::FAdd, a, b);
}
inline FloatExpr operator-(const FloatExpr& a, const FloatExpr& b) {
  return detail::floatOp(detail::Op::FSub, a, b);
}
inline FloatExpr operator-(const FloatExpr& a) { return detail::floatOp(detail::Op::FSub, 0, a); }
inline FloatExpr operator*(const FloatExpr& a, const FloatExpr& b) {
  return detail::floatOp(detail::Op::FMul, a, b);
}
inline FloatExpr min(const FloatExpr& a, const FloatExpr& b) {
  return detail::floatOp(detail::Op::FMin, a, b);
}
inline FloatExpr max(const FloatExpr& a, const FloatExpr& b) {
  return detail::floatOp(detail::Op::FMax, a, b);
}

// Clears the sign bit. Denormals remain denormal.
inline FloatExpr abs(const FloatExpr& a) { return detail::floatOp(detail::Op::FMaxAbs, a, a); }

// Functions of the special function unit: 1/x, 1/sqrt(|x|), 2^x and log2(|x|). For x = 0, 1/x and
// 1/sqrt(|x|) are Inf, 2^x is about 1, and log2(|x|) is -Inf. The typical relative error is 3e-5,
// and the maximum is 1e-4. For log2 results below 1, these figures are absolute errors. Even
// results of 1/x, 1/sqrt(|x|) and 2^x that are powers of two are not exact. The interpreter and the
// emulator produce identical bits, but a board produces different bits. qpu/math.h has functions
// with errors of a few ulp. Sources: samples and hardware tests published by VC4C and py-videocore.
inline FloatExpr recip(const FloatExpr& a) { return detail::floatOp(detail::Op::Recip, a); }
inline FloatExpr rsqrt(const FloatExpr& a) { return detail::floatOp(detail::Op::RecipSqrt, a); }
inline FloatExpr exp2(const FloatExpr& a) { return detail::floatOp(detail::Op::Exp2, a); }
inline FloatExpr log2(const FloatExpr& a) { return detail::floatOp(detail::Op::Log2, a); }

// Reinterpret the 32 bits of each element as a value of the other type.
inline IntExpr asInt(const FloatExpr& a) { return IntExpr(detail::FromNode(a.node())); }
inline FloatExpr asFloat(const IntExpr& a) { return FloatExpr(detail::FromNode(a.node())); }

// Conversions round toward zero. A float outside the 32-bit integer range becomes 0.
inline FloatExpr toFloat(const IntExpr& a) {
  return FloatExpr(
      detail::FromNode(detail::unary(detail::Op::ItoF, detail::Type::Float, a.node())));
}
inline IntExpr toInt(const FloatExpr& a) {
  return IntExpr(detail::FromNode(detail::unary(detail::Op::FtoI, detail::Type::Int, a.node())));
}

// Moves element i to position (i + n) mod 16. If n is 1, the vector rotates right by one element.
// If n is 15, it rotates left by one element. Only the low four bits of element 0 of n are used.
inline IntExpr rotate(const IntExpr& a, const IntExpr& n) {
  return detail::intOp(detail::Op::Rotate, a, n);
}
inline FloatExpr rotate(const FloatExpr& a, const IntExpr& n) {
  return FloatExpr(detail::FromNode(
      detail::binary(detail::Op::Rotate, detail::Type::Float, a.node(), n.node())));
}

// Copies element k (0..15) to all elements.
inline IntExpr broadcast(const IntExpr& a, int k, Location where = QPU_HERE) {
  return IntExpr(detail::FromNode(detail::broadcast(detail::Type::Int, a.node(), k, where)));
}
inline FloatExpr broadcast(const FloatExpr& a, int k, Location where = QPU_HERE) {
  return FloatExpr(detail::FromNode(detail::broadcast(detail::Type::Float, a.node(), k, where)));
}

// The unit of pointer arithmetic is one element of 4 bytes. Each of the 16 addresses changes by the
// corresponding element of i.
template <typename T>
PtrExpr<T> operator+(const PtrExpr<T>& p, const IntExpr& i) {
  return detail::offset(detail::Op::Add, p, i);
}
template <typename T>
PtrExpr<T> operator-(const PtrExpr<T>& p, const IntExpr& i) {
  return detail::offset(detail::Op::Sub, p, i);
}
template <typename T>
Deref<T> PtrExpr<T>::operator[](const IntExpr& i) const {
  return *(*this + i);
}

// A variable that holds 16 integers. A variable without an initialiser is 0 on the interpreter
// and undefined on hardware.
class Int : public IntExpr {
 public:
  Int(Location where = QPU_HERE) : IntExpr(fresh(where)) {}
  template <typename A, typename detail::IfNumber<A>::type = 0>
  Int(A value, Location where = QPU_HERE) : IntExpr(fresh(where)) {
    detail::assign(node(), IntExpr(value).node(), where);
  }
  Int(const IntExpr& value, Location where = QPU_HERE) : IntExpr(fresh(where)) {
    detail::assign(node(), value.node(), where);
  }
  Int(const Int& value, Location where = QPU_HERE) : IntExpr(fresh(where)) {
    detail::assign(node(), value.node(), where);
  }
  explicit Int(detail::FromNode variable) : IntExpr(variable) {}

  Int& operator=(const IntExpr& value) {
    detail::assign(node(), value.node(), Location());
    return *this;
  }
  Int& operator=(const Int& value) { return *this = static_cast<const IntExpr&>(value); }
  template <typename A, typename detail::IfNumber<A>::type = 0>
  Int& operator=(A value) {
    return *this = IntExpr(value);
  }
  Int& operator+=(const IntExpr& b) { return *this = *this + b; }
  Int& operator-=(const IntExpr& b) { return *this = *this - b; }
  Int& operator*=(const IntExpr& b) { return *this = *this * b; }
  Int& operator<<=(const IntExpr& b) { return *this = *this << b; }
  Int& operator>>=(const IntExpr& b) { return *this = *this >> b; }
  Int& operator&=(const IntExpr& b) { return *this = *this & b; }
  Int& operator|=(const IntExpr& b) { return *this = *this | b; }
  Int& operator^=(const IntExpr& b) { return *this = *this ^ b; }
  Int& operator++() { return *this = *this + 1; }
  // The postfix operator returns nothing, because the old value is not kept.
  void operator++(int) { ++*this; }

 private:
  static detail::FromNode fresh(Location where) {
    return detail::FromNode(detail::declare(detail::Type::Int, where));
  }
};

// A variable that holds 16 floats. As with Int, a variable without an initialiser is 0 on the
// interpreter and undefined on hardware.
class Float : public FloatExpr {
 public:
  Float(Location where = QPU_HERE) : FloatExpr(fresh(where)) {}
  template <typename A, typename detail::IfNumber<A>::type = 0>
  Float(A value, Location where = QPU_HERE) : FloatExpr(fresh(where)) {
    detail::assign(node(), FloatExpr(value).node(), where);
  }
  Float(const FloatExpr& value, Location where = QPU_HERE) : FloatExpr(fresh(where)) {
    detail::assign(node(), value.node(), where);
  }
  Float(const Float& value, Location where = QPU_HERE) : FloatExpr(fresh(where)) {
    detail::assign(node(), value.node(), where);
  }
  explicit Float(detail::FromNode variable) : FloatExpr(variable) {}

  Float& operator=(const FloatExpr& value) {
    detail::assign(node(), value.node(), Location());
    return *this;
  }
  Float& operator=(const Float& value) { return *this = static_cast<const FloatExpr&>(value); }
  template <typename A, typename detail::IfNumber<A>::type = 0>
  Float& operator=(A value) {
    return *this = FloatExpr(value);
  }
  Float& operator+=(const FloatExpr& b) { return *this = *this + b; }
  Float& operator-=(const FloatExpr& b) { return *this = *this - b; }
  Float& operator*=(const FloatExpr& b) { return *this = *this * b; }

 private:
  static detail::FromNode fresh(Location where) {
    return detail::FromNode(detail::declare(detail::Type::Float, where));
  }
};

// A variable that holds 16 addresses of elements of type T, where T is Int, Float or another Ptr.
template <typename T>
class Ptr : public PtrExpr<T> {
 public:
  Ptr(Location where = QPU_HERE) : PtrExpr<T>(fresh(where)) {}
  Ptr(const PtrExpr<T>& value, Location where = QPU_HERE) : PtrExpr<T>(fresh(where)) {
    detail::assign(this->node(), value.node(), where);
  }
  Ptr(const Ptr& value, Location where = QPU_HERE) : PtrExpr<T>(fresh(where)) {
    detail::assign(this->node(), value.node(), where);
  }
  explicit Ptr(detail::FromNode variable) : PtrExpr<T>(variable) {}

  Ptr& operator=(const PtrExpr<T>& value) {
    detail::assign(this->node(), value.node(), Location());
    return *this;
  }
  Ptr& operator=(const Ptr& value) { return *this = static_cast<const PtrExpr<T>&>(value); }
  Ptr& operator+=(const IntExpr& i) { return *this = *this + i; }
  Ptr& operator-=(const IntExpr& i) { return *this = *this - i; }

 private:
  static detail::FromNode fresh(Location where) {
    return detail::FromNode(detail::declare(detail::Type::Address, where));
  }
};

// Returns the element numbers 0, 1, .., 15.
inline IntExpr index() {
  return IntExpr(detail::FromNode(detail::leaf(detail::Op::ElementNumber, detail::Type::Int)));
}
// Returns this QPU's number (0 .. numQPUs() - 1), broadcast to all elements.
inline IntExpr me() {
  return IntExpr(detail::FromNode(detail::leaf(detail::Op::QpuNumber, detail::Type::Int)));
}
// Returns the number of QPUs that run this kernel, broadcast to all elements.
inline IntExpr numQPUs() {
  return IntExpr(detail::FromNode(detail::leaf(detail::Op::QpuCount, detail::Type::Int)));
}

}  // namespace qpu

#endif
