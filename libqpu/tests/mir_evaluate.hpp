// Evaluates machine operations on virtual registers. The results are those that the emitted code
// must produce.
#ifndef QPU_TESTS_MIR_EVALUATE_HPP
#define QPU_TESTS_MIR_EVALUATE_HPP

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <vector>

#include "compiler/mir.hpp"
#include "interp/vector_ops.hpp"

namespace mir {

using namespace qpu::compiler;  // NOLINT(google-build-using-namespace): for tests only
using qpu::interp::Vector;
namespace isa = qpu::isa;
namespace arith = qpu::interp;

struct Memory {
  std::uint32_t start = 0;
  std::vector<std::uint32_t> words;
  std::uint32_t& at(std::uint32_t address) {
    const std::uint32_t index = (address - start) / 4;
    if (address < start || index >= words.size()) throw std::out_of_range("memory");
    return words[index];
  }
};

inline std::uint32_t bytes(std::uint32_t a, std::uint32_t b,
                           int (*f)(int, int)) {
  std::uint32_t r = 0;
  for (unsigned k = 0; k < 32; k += 8)
    r |= static_cast<std::uint32_t>(f(static_cast<int>((a >> k) & 255U),
                                      static_cast<int>((b >> k) & 255U)))
         << k;
  return r;
}
inline std::uint32_t addBytes(std::uint32_t a, std::uint32_t b) {
  return bytes(a, b, [](int x, int y) { return x + y > 255 ? 255 : x + y; });
}
inline std::uint32_t subBytes(std::uint32_t a, std::uint32_t b) {
  return bytes(a, b, [](int x, int y) { return x < y ? 0 : x - y; });
}

class Run {
 public:
  Run(const Function& function, std::vector<std::uint32_t> uniforms, Memory& memory)
      : function_(function),
        uniforms_(std::move(uniforms)),
        memory_(memory),
        registers_(function.registers, Vector{}) {}

  void operator()() {
    std::uint32_t block = 0;
    for (int steps = 0; steps < 100000; ++steps) {
      const Block& b = function_.blocks[block];
      for (const Operation& o : b.operations) step(o);
      if (b.exit == Block::Exit::End) return;
      block = b.exit == Block::Exit::Branch && taken(b.cond) ? b.taken : b.next;
    }
    throw std::runtime_error("the program does not end");
  }

 private:
  Vector operand(const Operand& o) const {
    if (o.isRegister()) return registers_[o.value];
    return arith::splat(o.value);
  }

  static Vector add(isa::AddOp op, const Vector& a, const Vector& b) {
    Vector r{};
    using isa::AddOp;
    const auto each = [&](auto f) {
      for (std::size_t i = 0; i < 16; ++i) r.e[i] = f(a.e[i], b.e[i]);
    };
    using U = std::uint32_t;
    const auto s = [](U x) { return static_cast<std::int32_t>(x); };
    switch (op) {
      case AddOp::FAdd: arith::vectorFadd(r, a, b); break;
      case AddOp::FSub: arith::vectorFsub(r, a, b); break;
      case AddOp::FMin: each(arith::fmin); break;
      case AddOp::FMax: each(arith::fmax); break;
      case AddOp::FtoI: each([](U x, U) { return arith::ftoi(x); }); break;
      case AddOp::ItoF: each([](U x, U) { return arith::itof(x); }); break;
      case AddOp::Add: each([](U x, U y) { return x + y; }); break;
      case AddOp::Sub: each([](U x, U y) { return x - y; }); break;
      case AddOp::Shr: each(arith::shr); break;
      case AddOp::Asr: each(arith::asr); break;
      case AddOp::Ror: each(arith::ror); break;
      case AddOp::Shl: each(arith::shl); break;
      case AddOp::Min: each([s](U x, U y) { return s(x) > s(y) ? y : x; }); break;
      case AddOp::Max: each([s](U x, U y) { return s(x) > s(y) ? x : y; }); break;
      case AddOp::And: each([](U x, U y) { return x & y; }); break;
      case AddOp::Or: each([](U x, U y) { return x | y; }); break;
      case AddOp::Xor: each([](U x, U y) { return x ^ y; }); break;
      case AddOp::Not: each([](U x, U) { return ~x; }); break;
      case AddOp::Clz:
        each([](U x, U) { return x == 0 ? 32U : static_cast<U>(__builtin_clz(x)); });
        break;
      case AddOp::V8AddS: each(addBytes); break;
      case AddOp::V8SubS: each(subBytes); break;
      default: throw std::logic_error("not an operation of these tests");
    }
    return r;
  }
  static Vector mul(isa::MulOp op, const Vector& a, const Vector& b) {
    Vector r{};
    using isa::MulOp;
    using U = std::uint32_t;
    const auto each = [&](auto f) {
      for (std::size_t i = 0; i < 16; ++i) r.e[i] = f(a.e[i], b.e[i]);
    };
    switch (op) {
      case MulOp::FMul: arith::vectorFmul(r, a, b); break;
      case MulOp::Mul24: each(arith::mul24); break;
      case MulOp::V8Min:
        each([](U x, U y) { return bytes(x, y, [](int p, int q) { return p < q ? p : q; }); });
        break;
      case MulOp::V8Max:
        each([](U x, U y) { return bytes(x, y, [](int p, int q) { return p > q ? p : q; }); });
        break;
      case MulOp::V8AddS: each(addBytes); break;
      case MulOp::V8SubS: each(subBytes); break;
      default: throw std::logic_error("not an operation of these tests");
    }
    return r;
  }

  bool holds(isa::Cond c, std::size_t i) const {
    switch (c) {
      case isa::Cond::Always: return true;
      case isa::Cond::ZSet: return zero_[i];
      case isa::Cond::ZClear: return !zero_[i];
      case isa::Cond::NSet: return negative_[i];
      case isa::Cond::NClear: return !negative_[i];
      default: throw std::logic_error("not a condition of these tests");
    }
  }
  bool taken(isa::BranchCond c) const {
    unsigned z = 0;
    unsigned n = 0;
    for (std::size_t i = 0; i < 16; ++i) {
      z += zero_[i] ? 1U : 0U;
      n += negative_[i] ? 1U : 0U;
    }
    using isa::BranchCond;
    switch (c) {
      case BranchCond::AllZSet: return z == 16;
      case BranchCond::AllZClear: return z == 0;
      case BranchCond::AnyZSet: return z != 0;
      case BranchCond::AnyZClear: return z != 16;
      case BranchCond::AllNSet: return n == 16;
      case BranchCond::AllNClear: return n == 0;
      case BranchCond::AnyNSet: return n != 0;
      case BranchCond::AnyNClear: return n != 16;
      case BranchCond::Always: return true;
      default: throw std::logic_error("not a condition of these tests");
    }
  }

  void write(const Operation& o, const Vector& r) {
    std::array<bool, 16> where{};
    for (std::size_t i = 0; i < 16; ++i) where[i] = holds(o.cond, i);
    if (o.setsFlags)
      for (std::size_t i = 0; i < 16; ++i)
        if (where[i]) {
          zero_[i] = r.e[i] == 0;
          negative_[i] = (r.e[i] >> 31U) != 0;
        }
    if (o.target == Operation::kNone) return;
    for (std::size_t i = 0; i < 16; ++i)
      if (where[i]) registers_[o.target].e[i] = r.e[i];
  }

  void step(const Operation& o) {
    const Vector a = operand(o.a);
    switch (o.op) {
      case Op::Add:
        write(o, add(o.add, a, o.b.kind == Operand::Kind::None ? a : operand(o.b)));
        break;
      case Op::Mul: write(o, mul(o.mul, a, operand(o.b))); break;
      case Op::Move: write(o, a); break;
      case Op::Load: write(o, arith::splat(o.constant)); break;
      case Op::LoadPerElement: {
        Vector r{};
        for (unsigned i = 0; i < 16; ++i)
          r.e[i] = ((o.constant >> i) & 1U) | (((o.constant >> (16 + i)) & 1U) << 1U);
        write(o, r);
        break;
      }
      case Op::ElementNumber: {
        Vector r{};
        for (unsigned i = 0; i < 16; ++i) r.e[i] = i;
        write(o, r);
        break;
      }
      case Op::Uniform: write(o, arith::splat(uniforms_.at(nextUniform_++))); break;
      case Op::Rotate: {
        Vector r{};
        arith::rotateUp(r, a, operand(o.b).e[0] & 15U);
        write(o, r);
        break;
      }
      case Op::Broadcast: write(o, arith::splat(a.e[o.constant & 15U])); break;
      case Op::Sfu: {
        Vector r{};
        for (std::size_t i = 0; i < 16; ++i)
          r.e[i] = o.constant == isa::address::kSfuRecip       ? arith::recip(a.e[i])
                   : o.constant == isa::address::kSfuRecipSqrt ? arith::recipSqrt(a.e[i])
                   : o.constant == isa::address::kSfuExp       ? arith::exp2(a.e[i])
                                                               : arith::log2(a.e[i]);
        write(o, r);
        break;
      }
      case Op::TmuRequest: {
        Vector r{};
        for (std::size_t i = 0; i < 16; ++i) r.e[i] = memory_.at(a.e[i] & ~3U);
        tmu_[o.unit].push_back(r);
        if (tmu_[o.unit].size() > 4) throw std::logic_error("more than 4 requests");
        break;
      }
      case Op::TmuReceive:
        if (tmu_[o.unit].empty()) throw std::logic_error("no request is outstanding");
        write(o, tmu_[o.unit].front());
        tmu_[o.unit].pop_front();
        break;
      case Op::VpmReadSetup:
        if ((a.e[0] >> 30U) == 0)
          readRow_ = a.e[0] & 63U;
        else if ((a.e[0] >> 28U) != 9)
          load_ = a.e[0];
        break;
      case Op::VpmWriteSetup:
        if ((a.e[0] >> 30U) == 0)
          setWriteRow(a.e[0]);
        else if ((a.e[0] >> 30U) == 2)
          store_ = a.e[0];
        break;
      case Op::VpmRead: write(o, vpm_[readRow_++ & 63U]); break;
      case Op::VpmWrite:
        vpm_[writeRow_ & 63U] = a;
        writeRow_ += writeStride_;
        break;
      case Op::DmaLoadStart:
        for (std::uint32_t i = 0; i < 16; ++i)
          vpm_[(load_ >> 4U) & 63U].e[i] = memory_.at(a.e[0] + 4 * i);
        break;
      case Op::DmaStoreStart:
        for (std::uint32_t i = 0; i < 16; ++i)
          memory_.at(a.e[0] + 4 * i) = vpm_[(store_ >> 7U) & 63U].e[i];
        break;
      default: break;
    }
  }

  void setWriteRow(std::uint32_t word) {
    writeRow_ = word & 63U;
    writeStride_ = (word >> 12U) & 63U;
  }

  const Function& function_;
  std::vector<std::uint32_t> uniforms_;
  std::size_t nextUniform_ = 0;
  Memory& memory_;
  std::vector<Vector> registers_;
  std::array<bool, 16> zero_{}, negative_{};
  std::array<std::deque<Vector>, 2> tmu_;
  std::array<Vector, 64> vpm_{};
  std::uint32_t readRow_ = 0, writeRow_ = 0, writeStride_ = 0, load_ = 0, store_ = 0;
};

}  // namespace mir

#endif
