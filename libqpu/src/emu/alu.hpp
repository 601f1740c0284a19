// Emulates the two ALUs on complete vectors: results, flags, packing and unpacking. Results are
// bit-identical to those of interp/arith.hpp. On x86, the common case of a float operation uses the
// host's float instructions with rounding toward zero. All other cases take a slower exact path.
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

using Mask = std::uint32_t;  // bit i stands for element i
constexpr Mask kAllElements = 0xffffU;

// While an object of this class exists, the host's float operations round toward zero and flush
// denormals, as add() and multiply() require. This mode also affects arithmetic on doubles. Code
// that depends on rounding to nearest must use HostRounding.
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

// Additional operation numbers, which follow the 32 numbers that can be encoded. The additional
// operations are shifts by the same constant amount in all elements.
enum : std::uint8_t { kShrBy = 32, kAsrBy, kShlBy };

// `r` must not be the same object as `a` or `b`. A QpuRounding object must exist during the call.
void add(std::uint8_t op, const Vector& a, const Vector& b, Vector& r);
void multiply(isa::MulOp op, const Vector& a, const Vector& b, Vector& r);

// Computes a function of the special function unit. `address` is the address of the register that
// is written to start the function.
void special(std::uint8_t address, const Vector& a, Vector& r);

// Rotates the complete vector if `full` is true, and each quad otherwise.
void rotate(Vector& v, unsigned n, bool full);

Mask negative(const Vector& v);
Mask zero(const Vector& v);
// Returns the carry flags of an operation with operands a and b. For an operation of the ADD pipe,
// `r` is the result.
Mask carry(isa::AddOp op, const Vector& a, const Vector& b, const Vector& r);
Mask carry(isa::MulOp op, const Vector& a, const Vector& b);

// Writes the elements of `value` that are selected by `where` to `target`.
void write(Vector& target, const Vector& value, Mask where);

// The operation whose result is packed for register file A (pm = 0). Packing writes this result
// to parts of the old vector.
struct PackSource {
  bool isFloat = false;
  isa::AddOp op = isa::AddOp::Nop;  // only Add and Sub can overflow
  const Vector* a = nullptr;        // the operands of `op`
  const Vector* b = nullptr;
};
Vector packA(unsigned mode, const Vector& value, const Vector& old, const PackSource& source);
Vector packColour(unsigned mode, const Vector& value, const Vector& old);

// `asFloat` is true if a float operation uses the value. With pm = 1, unpacking always returns
// floats.
Vector unpack(unsigned mode, const Vector& value, bool asFloat);

}  // namespace qpu::emu

#endif
