// The two ALUs on whole vectors: results, flags, pack and unpack. Results are bit-identical to
// interp/arith.hpp. On x86, the common case of float operations uses the host's float
// instructions with rounding toward zero; other cases take the exact path.
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

using Mask = std::uint32_t;  // bit i is for element i
constexpr Mask kAllElements = 0xffffU;

// During an object's lifetime, the host's float operations round toward zero and flush denormals,
// as add() and multiply() require. The mode also affects double arithmetic: code that depends on
// rounding to nearest must use HostRounding.
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

// Operation numbers above the 32 of the encoding, for shifts by the same constant in all
// elements.
enum : std::uint8_t { kShrBy = 32, kAsrBy, kShlBy };

// `r` must be neither `a` nor `b`. Requires QpuRounding.
void add(std::uint8_t op, const Vector& a, const Vector& b, Vector& r);
void multiply(isa::MulOp op, const Vector& a, const Vector& b, Vector& r);

// The special function unit. `address` is the address of the written register.
void special(std::uint8_t address, const Vector& a, Vector& r);

// Rotates the whole vector, or each quad.
void rotate(Vector& v, unsigned n, bool full);

Mask negative(const Vector& v);
Mask zero(const Vector& v);
// Carry flag of an operation with operands a and b and result r.
Mask carry(isa::AddOp op, const Vector& a, const Vector& b, const Vector& r);
Mask carry(isa::MulOp op, const Vector& a, const Vector& b);

// Writes the elements of `value` that are in `where` to `target`.
void write(Vector& target, const Vector& value, Mask where);

// Packing for register file A (pm = 0): writes `value`, an operation's result, to parts of `old`.
struct PackSource {
  bool isFloat = false;
  isa::AddOp op = isa::AddOp::Nop;  // Add and Sub can overflow
  const Vector* a = nullptr;        // their operands
  const Vector* b = nullptr;
};
Vector packA(unsigned mode, const Vector& value, const Vector& old, const PackSource& source);
Vector packColour(unsigned mode, const Vector& value, const Vector& old);

// `asFloat`: a float operation uses the value. With pm = 1, unpacking always gives a float.
Vector unpack(unsigned mode, const Vector& value, bool asFloat);

}  // namespace qpu::emu

#endif
