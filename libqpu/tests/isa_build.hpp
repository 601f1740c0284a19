// Builds instructions from their parts for tests.
#ifndef QPU_TESTS_ISA_BUILD_HPP
#define QPU_TESTS_ISA_BUILD_HPP

#include <cstdint>

#include "isa/instruction.hpp"

namespace isa_build {

using qpu::isa::AddOp;
using qpu::isa::BranchCond;
using qpu::isa::Cond;
using qpu::isa::Form;
using qpu::isa::Instruction;
using qpu::isa::MulOp;
using qpu::isa::Mux;
using qpu::isa::Signal;
namespace address = qpu::isa::address;

enum class Side : std::uint8_t { Either, A, B };

// The destination of a result: an address in file A, in file B, or in both files.
struct Out {
  Side side;
  std::uint8_t address;
};

// An operand of an ALU.
struct In {
  Mux mux;
  std::uint8_t address;
  bool immediate;
};

constexpr std::uint8_t byte(int n) { return static_cast<std::uint8_t>(n); }

constexpr In r(int n) { return {static_cast<Mux>(n), 0, false}; }
constexpr In ra(int n) { return {Mux::A, byte(n), false}; }
constexpr In rb(int n) { return {Mux::B, byte(n), false}; }
constexpr In imm(int code) { return {Mux::B, byte(code), true}; }
constexpr Out toR(int n) { return {Side::Either, byte(address::kR0 + n)}; }
constexpr Out toA(int n) { return {Side::A, byte(n)}; }
constexpr Out toB(int n) { return {Side::B, byte(n)}; }
constexpr Out to(int n) { return {Side::Either, byte(n)}; }

inline void read(Instruction& i, In in) {
  if (in.mux == Mux::A) i.raddrA = in.address;
  if (in.mux == Mux::B) i.raddrB = in.address;
  if (in.immediate) i.signal = Signal::SmallImmediate;
}

inline Instruction nop() { return {}; }

inline Instruction add(AddOp op, Out out, In a, In b, Cond cond = Cond::Always) {
  Instruction i;
  i.opAdd = op;
  i.condAdd = cond;
  i.swap = out.side == Side::B;
  i.waddrAdd = out.address;
  i.addA = a.mux;
  i.addB = b.mux;
  read(i, a);
  read(i, b);
  return i;
}

inline Instruction mul(MulOp op, Out out, In a, In b, Cond cond = Cond::Always) {
  Instruction i;
  i.opMul = op;
  i.condMul = cond;
  i.swap = out.side == Side::A;
  i.waddrMul = out.address;
  i.mulA = a.mux;
  i.mulB = b.mux;
  read(i, a);
  read(i, b);
  return i;
}

inline Instruction move(Out out, In a, Cond cond = Cond::Always) {
  return add(AddOp::Or, out, a, a, cond);
}

// Combines the ADD pipe of `a` with the MUL pipe of `m`.
inline Instruction both(Instruction a, const Instruction& m) {
  a.opMul = m.opMul;
  a.condMul = m.condMul;
  a.waddrMul = m.waddrMul;
  a.mulA = m.mulA;
  a.mulB = m.mulB;
  a.swap = a.swap || m.swap;
  if (m.raddrA != address::kNop) a.raddrA = m.raddrA;
  if (m.raddrB != address::kNop) a.raddrB = m.raddrB;
  if (m.signal != Signal::None) a.signal = m.signal;
  return a;
}

inline Instruction load(Out out, std::uint32_t value, Form form = Form::LoadImmediate) {
  Instruction i;
  i.form = form;
  i.condAdd = Cond::Always;
  i.swap = out.side == Side::B;
  i.waddrAdd = out.address;
  i.immediate = value;
  return i;
}

inline Instruction semaphore(int number, bool acquire) {
  Instruction i;
  i.form = Form::Semaphore;
  i.immediate = static_cast<std::uint32_t>(number) | (acquire ? 16U : 0U);
  return i;
}

inline Instruction branch(int bytes, BranchCond cond = BranchCond::Always) {
  Instruction i;
  i.form = Form::Branch;
  i.branchCond = cond;
  i.branchRelative = true;
  i.immediate = static_cast<std::uint32_t>(bytes);
  return i;
}

inline Instruction signal(Signal s, Instruction i = {}) {
  i.signal = s;
  return i;
}

inline Instruction readA(int n) {
  Instruction i;
  i.raddrA = byte(n);
  return i;
}

inline Instruction readB(int n) {
  Instruction i;
  i.raddrB = byte(n);
  return i;
}

inline Instruction packed(int pack, Instruction i) {
  i.pack = byte(pack);
  return i;
}

inline Instruction unpacked(int unpack, Instruction i) {
  i.unpack = byte(unpack);
  return i;
}

inline Instruction flags(Instruction i) {
  i.setFlags = true;
  return i;
}

inline Instruction swapped(Instruction i) {
  i.swap = true;
  return i;
}

}  // namespace isa_build

#endif
