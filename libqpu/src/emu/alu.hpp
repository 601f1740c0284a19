// The two ALUs on whole vectors: results, flags, pack and unpack. Bit equal to
// interp/arith.hpp everywhere; on x86 the common case of the float operations
// uses the host's own, rounding toward zero, and the rest goes the exact way.
#ifndef QPU_SRC_EMU_ALU_HPP
#define QPU_SRC_EMU_ALU_HPP

#include <cstdint>

#include "interp/vector_ops.hpp"
#include "isa/instruction.hpp"

#if defined(__SSE2__) && !defined(QPU_EMU_PORTABLE)
#include <emmintrin.h>
#define QPU_EMU_SSE2 1
#endif

namespace qpu::emu {

using interp::kElements;
using interp::Vector;

using Mask = std::uint32_t;  // bit i is element i
constexpr Mask kAllElements = 0xffffU;

// While it lives, the host's float operations round toward zero and flush
// denormals, as compute() needs. Double arithmetic does so too: code that relies
// on rounding to nearest runs in HostRounding.
class QpuRounding {
 public:
#ifdef QPU_EMU_SSE2
  QpuRounding() : before_(_mm_getcsr()) { _mm_setcsr(kMasked | kTowardZero | kFlush); }
  ~QpuRounding() { _mm_setcsr(before_); }
#else
  QpuRounding() = default;
  ~QpuRounding() = default;
#endif
  QpuRounding(const QpuRounding&) = delete;
  QpuRounding& operator=(const QpuRounding&) = delete;

 private:
#ifdef QPU_EMU_SSE2
  static constexpr unsigned kMasked = 0x1f80, kTowardZero = 0x6000, kFlush = 0x8040;
  unsigned before_;
#endif
};

class HostRounding {
 public:
#ifdef QPU_EMU_SSE2
  HostRounding() : before_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~HostRounding() { _mm_setcsr(before_); }
#else
  HostRounding() = default;
  ~HostRounding() = default;
#endif
  HostRounding(const HostRounding&) = delete;
  HostRounding& operator=(const HostRounding&) = delete;

 private:
#ifdef QPU_EMU_SSE2
  static constexpr unsigned kDefault = 0x1f80;
  unsigned before_;
#endif
};

// Shifts whose amount is the same constant in all elements have numbers of their
// own beyond the 32 of the encoding.
enum : std::uint8_t { kShrBy = 32, kAsrBy, kShlBy };

// `r` is neither `a` nor `b`. Within QpuRounding.
void add(std::uint8_t op, const Vector& a, const Vector& b, Vector& r);
void multiply(isa::MulOp op, const Vector& a, const Vector& b, Vector& r);

// The special function unit; `address` is that of the register written.
void special(std::uint8_t address, const Vector& a, Vector& r);

// Full rotation or within each quad.
void rotate(Vector& v, unsigned n, bool full);

Mask negative(const Vector& v);
Mask zero(const Vector& v);
// C of an operation with operands a, b and result r.
Mask carry(isa::AddOp op, const Vector& a, const Vector& b, const Vector& r);
Mask carry(isa::MulOp op, const Vector& a, const Vector& b);

// target <- value in the elements of `where`.
void write(Vector& target, const Vector& value, Mask where);

// File A's pack (pm = 0): `value`, the result of an operation on ... and b, goes
// into parts of `old`.
struct PackSource {
  bool isFloat = false;
  isa::AddOp op = isa::AddOp::Nop;  // Add and Sub may overflow
  const Vector* a = nullptr;        // their operands
  const Vector* b = nullptr;
};
Vector packA(unsigned mode, const Vector& value, const Vector& old, const PackSource& source);
Vector packColour(unsigned mode, const Vector& value, const Vector& old);

// `asFloat`: a float operation consumes the value. pm = 1 unpacks always to float.
Vector unpack(unsigned mode, const Vector& value, bool asFloat);

}  // namespace qpu::emu

#endif
