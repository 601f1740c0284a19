// Runs machine operations on virtual registers, to test the front end of the compiler without its back
// end. The memory is that of the SharedArrays.
#ifndef TESTS_MIR_RUN_HPP
#define TESTS_MIR_RUN_HPP

#include <array>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "compiler/fold.hpp"
#include "compiler/mir.hpp"
#include "compiler/mir_text.hpp"
#include "interp/arith.hpp"
#include "interp/memory.hpp"
#include "interp/vector_ops.hpp"

namespace test {

namespace mir = qpu::compiler;
using qpu::interp::Vector;

class MirMachine {
 public:
  MirMachine(const mir::Function& f, int qpus, const std::vector<std::uint32_t>& arguments)
      : f_(f), memory_(1), qpus_(static_cast<std::size_t>(qpus)) {
    for (std::size_t i = 0; i < qpus_.size(); ++i) {
      Qpu& q = qpus_[i];
      q.number = static_cast<std::uint32_t>(i);
      // Undefined contents, as on hardware.
      for (Vector& v : q.registers = std::vector<Vector>(f.registers))
        for (std::uint32_t e = 0; e < 16; ++e) v.e[e] = 0xdeadbe00U + e;
      for (const qpu::code::Uniform& u : f.uniforms) {
        using Kind = qpu::code::Uniform::Kind;
        q.uniforms.push_back(u.kind == Kind::QpuNumber   ? q.number
                             : u.kind == Kind::QpuCount  ? static_cast<std::uint32_t>(qpus)
                             : u.kind == Kind::Argument  ? arguments.at(u.value)
                                                         : u.value);
      }
    }
  }

  void run() {
    for (std::size_t ended = 0; ended < qpus_.size();) {
      bool progress = false;
      ended = 0;
      for (Qpu& q : qpus_) {
        progress = advance(q) || progress;
        if (q.ended) ++ended;
      }
      if (!progress && ended < qpus_.size()) throw std::runtime_error("deadlock");
    }
    for (const int s : semaphores_)
      if (s != 0) throw std::runtime_error("a semaphore is not 0 at the end");
    if (interrupts_ != 1) throw std::runtime_error("the host interrupt was not raised exactly once");
  }

 private:
  struct Window {
    std::uint32_t word = 0;
    bool ready = false;
    std::uint32_t left = 0;
  };
  struct Qpu {
    std::uint32_t number = 0;
    std::vector<Vector> registers;
    std::deque<std::uint32_t> uniforms;
    std::array<bool, 16> n{}, z{}, c{};
    std::array<std::deque<Vector>, 2> tmu;
    Window reads, writes;
    std::uint32_t loadWord = 0, loadPitch = 0, storeWord = 0, storeStride = 0;
    bool loading = false, storing = false;
    std::size_t block = 0, operation = 0;
    bool ended = false;
  };

  [[noreturn]] static void fail(const std::string& what) { throw std::runtime_error(what); }

  unsigned char* words(std::uint32_t address, std::uint32_t count) {
    unsigned char* p = memory_.find(0, address, 4 * count);
    if (p == nullptr) fail("access outside of all arrays: " + std::to_string(address));
    return p;
  }

  static Vector value(const Qpu& q, const mir::Operand& o) {
    return o.isRegister() ? q.registers[o.value] : qpu::interp::splat(o.value);
  }

  static bool holds(const Qpu& q, qpu::isa::Cond c, std::size_t i) {
    using qpu::isa::Cond;
    switch (c) {
      case Cond::Never: return false;
      case Cond::Always: return true;
      case Cond::ZSet: return q.z[i];
      case Cond::ZClear: return !q.z[i];
      case Cond::NSet: return q.n[i];
      case Cond::NClear: return !q.n[i];
      case Cond::CSet: return q.c[i];
      case Cond::CClear: return !q.c[i];
    }
    return false;
  }

  static bool carry(qpu::isa::AddOp op, std::uint32_t a, std::uint32_t b, std::uint32_t r) {
    using qpu::isa::AddOp;
    using qpu::interp::asSigned;
    switch (op) {
      case AddOp::Add: return r < a;
      case AddOp::Sub: return a < b;
      case AddOp::Min:
      case AddOp::Max: return asSigned(a) > asSigned(b);
      case AddOp::FAdd:
      case AddOp::FSub: return r != 0 && (r >> 31U) == 0;
      case AddOp::FMin:
      case AddOp::FMax: return qpu::interp::order(a) > qpu::interp::order(b);
      case AddOp::And:
      case AddOp::Or:
      case AddOp::Xor:
      case AddOp::Not: return false;
      default: fail("carry of this operation is not modelled");
    }
  }

  void write(Qpu& q, const mir::Operation& o, const Vector& r, const Vector& a, const Vector& b) {
    const auto n = q.n, z = q.z, c = q.c;
    const Qpu before = [&] {
      Qpu flags;
      flags.n = n;
      flags.z = z;
      flags.c = c;
      return flags;
    }();
    for (std::size_t i = 0; i < 16; ++i) {
      if (!holds(before, o.cond, i)) continue;
      if (o.target != mir::Operation::kNone) q.registers[o.target].e[i] = r.e[i];
      if (!o.setsFlags) continue;
      q.n[i] = (r.e[i] >> 31U) != 0;
      q.z[i] = r.e[i] == 0;
      q.c[i] = o.op == mir::Op::Add && carry(o.add, a.e[i], b.e[i], r.e[i]);
    }
  }

  void set(Qpu& q, const mir::Operation& o, const Vector& r) { write(q, o, r, r, r); }

  Vector* row(std::uint32_t y) { return &vpm_[y % 64]; }
  std::uint32_t& element(std::uint32_t word, std::uint32_t address, std::uint32_t i) {
    if ((word >> 8U & 3U) != 2) fail("only 32-bit vectors are modelled");
    if ((word >> 11U & 1U) != 0) return vpm_[address & 63U].e[i];
    return vpm_[(address & 0x30U) + i].e[address & 15U];
  }
  static void advance(Window& w) {
    const std::uint32_t stride = w.word >> 12U & 63U;
    w.word = (w.word & ~63U) | ((w.word + stride) & 63U);
  }

  void load(Qpu& q, std::uint32_t address) {
    if (q.loading) fail("a DMA load starts before a wait for the previous one");
    const std::uint32_t w = q.loadWord;
    if (w >> 31U == 0) fail("no DMA load is set up");
    const auto or16 = [](std::uint32_t n) { return n == 0 ? 16 : n; };
    const std::uint32_t rows = or16(w >> 16U & 15U), length = or16(w >> 20U & 15U);
    const std::uint32_t pitch = w >> 24U & 15U;
    for (std::uint32_t i = 0; i < rows; ++i) {
      const unsigned char* p = words(address, length);
      for (std::uint32_t j = 0; j < length; ++j) {
        const bool vertical = (w >> 11U & 1U) != 0;
        const std::uint32_t y = (w >> 4U & 127U) + i * or16(w >> 12U & 15U) + (vertical ? j : 0);
        std::memcpy(&row(y)->e[(w & 15U) + (vertical ? 0 : j)], p + 4 * j, 4);
      }
      address += pitch == 0 ? q.loadPitch : 8U << pitch;
    }
    q.loading = true;
  }

  void store(Qpu& q, std::uint32_t address) {
    if (q.storing) fail("a DMA store starts before a wait for the previous one");
    const std::uint32_t w = q.storeWord;
    if (w >> 30U != 2) fail("no DMA store is set up");
    const auto or128 = [](std::uint32_t n) { return n == 0 ? 128 : n; };
    const std::uint32_t rows = or128(w >> 23U & 127U), length = or128(w >> 16U & 127U);
    const bool horizontal = (w >> 14U & 1U) != 0;
    for (std::uint32_t i = 0; i < rows; ++i) {
      unsigned char* p = words(address, length);
      for (std::uint32_t j = 0; j < length; ++j)
        std::memcpy(p + 4 * j,
                    &row((w >> 7U & 127U) + (horizontal ? i : j))
                         ->e[(w >> 3U & 15U) + (horizontal ? j : i)],
                    4);
      address += 4 * length + q.storeStride;
    }
    q.storing = true;
  }

  // Returns false if the QPU has to wait.
  bool step(Qpu& q, const mir::Operation& o) {
    using mir::Op;
    const Vector a = value(q, o.a);
    const Vector b = value(q, o.b);
    Vector r{};
    switch (o.op) {
      case Op::Add:
        for (std::size_t i = 0; i < 16; ++i) r.e[i] = mir::fold(o.add, a.e[i], b.e[i]).value();
        write(q, o, r, a, b);
        break;
      case Op::Mul:
        for (std::size_t i = 0; i < 16; ++i) r.e[i] = mir::fold(o.mul, a.e[i], b.e[i]).value();
        set(q, o, r);
        break;
      case Op::Move: set(q, o, a); break;
      case Op::Load: set(q, o, qpu::interp::splat(o.constant)); break;
      case Op::ElementNumber:
        for (std::uint32_t i = 0; i < 16; ++i) r.e[i] = i;
        set(q, o, r);
        break;
      case Op::Uniform:
        set(q, o, qpu::interp::splat(q.uniforms.front()));
        q.uniforms.pop_front();
        break;
      case Op::Rotate:
        qpu::interp::rotateUp(r, a, b.e[0] % 16);
        set(q, o, r);
        break;
      case Op::Broadcast: set(q, o, qpu::interp::splat(a.e[o.constant])); break;
      case Op::Sfu:
        for (std::size_t i = 0; i < 16; ++i)
          r.e[i] = o.constant == 52   ? qpu::interp::recip(a.e[i])
                   : o.constant == 53 ? qpu::interp::recipSqrt(a.e[i])
                   : o.constant == 54 ? qpu::interp::exp2(a.e[i])
                                      : qpu::interp::log2(a.e[i]);
        set(q, o, r);
        break;
      case Op::TmuRequest:
        if (q.tmu[o.unit].size() == 4) fail("a fifth request to one TMU");
        for (std::size_t i = 0; i < 16; ++i) {
          const unsigned char* p = memory_.find(0, a.e[i] & ~3U, 4);
          r.e[i] = 0xbadbad00U;
          if (p != nullptr) std::memcpy(&r.e[i], p, 4);
        }
        q.tmu[o.unit].push_back(r);
        break;
      case Op::TmuReceive:
        if (q.tmu[o.unit].empty()) fail("no request is outstanding");
        set(q, o, q.tmu[o.unit].front());
        q.tmu[o.unit].pop_front();
        break;
      case Op::VpmReadSetup:
        if (a.e[0] >> 28U == 9) {
          q.loadPitch = a.e[0] & 0x1fffU;
        } else if (a.e[0] >> 31U != 0) {
          q.loadWord = a.e[0];
        } else {
          if (q.reads.left != 0) fail("vectors of the previous read setup are unread");
          if (q.loading) fail("a VPM read is set up while a DMA load runs");
          q.reads = {a.e[0], true, (a.e[0] >> 20U & 15U) == 0 ? 16 : a.e[0] >> 20U & 15U};
        }
        break;
      case Op::VpmWriteSetup:
        if (a.e[0] >> 30U == 3)
          q.storeStride = a.e[0] & 0x1fffU;
        else if (a.e[0] >> 30U == 2)
          q.storeWord = a.e[0];
        else
          q.writes = {a.e[0], true, 0};
        if (a.e[0] >> 30U != 0 && q.storing) fail("a DMA store is set up while another one runs");
        break;
      case Op::VpmRead:
        if (q.reads.left == 0) fail("a VPM read without setup");
        for (std::uint32_t i = 0; i < 16; ++i) r.e[i] = element(q.reads.word, q.reads.word, i);
        advance(q.reads);
        --q.reads.left;
        set(q, o, r);
        break;
      case Op::VpmWrite:
        if (!q.writes.ready) fail("a VPM write without setup");
        for (std::uint32_t i = 0; i < 16; ++i) element(q.writes.word, q.writes.word, i) = a.e[i];
        advance(q.writes);
        break;
      case Op::DmaLoadStart:
        if (q.storing) fail("a DMA load while a store runs");
        load(q, a.e[0]);
        break;
      case Op::DmaStoreStart: store(q, a.e[0]); break;
      case Op::DmaLoadWait: q.loading = false; break;
      case Op::DmaStoreWait: q.storing = false; break;
      case Op::SemaphoreAcquire:
        if (semaphores_[o.constant] == 0) return false;
        --semaphores_[o.constant];
        break;
      case Op::SemaphoreRelease:
        if (q.storing) fail("a semaphore is released while a store runs");
        if (semaphores_[o.constant] == 15) return false;
        ++semaphores_[o.constant];
        break;
      case Op::HostInterrupt: ++interrupts_; break;
      default: fail("not modelled: " + mir::text(o));
    }
    return true;
  }

  bool advance(Qpu& q) {
    bool progress = false;
    while (!q.ended) {
      const mir::Block& block = f_.blocks[q.block];
      if (q.operation < block.operations.size()) {
        const mir::Operation& o = block.operations[q.operation];
        try {
          if (!step(q, o)) return progress;
        } catch (const std::runtime_error& e) {
          throw std::runtime_error("QPU " + std::to_string(q.number) + ", block " +
                                   std::to_string(q.block) + ", " + mir::text(o) + ": " +
                                   e.what());
        }
        ++q.operation;
        progress = true;
        continue;
      }
      progress = true;
      q.operation = 0;
      if (block.exit == mir::Block::Exit::End) {
        end(q);
        continue;
      }
      if (block.exit == mir::Block::Exit::Branch && taken(q, block.cond))
        q.block = block.taken;
      else
        q.block = block.next;
    }
    return progress;
  }

  static void end(Qpu& q) {
    if (q.storing || q.loading) fail("the program ends while a DMA transfer runs");
    if (!q.tmu[0].empty() || !q.tmu[1].empty()) fail("the program ends with outstanding requests");
    if (q.reads.left != 0) fail("the program ends with unread vectors");
    q.ended = true;
  }

  static bool taken(const Qpu& q, qpu::isa::BranchCond c) {
    const auto number = static_cast<unsigned>(c);
    if (c == qpu::isa::BranchCond::Always) return true;
    const std::array<bool, 16>& flag = number < 4 ? q.z : number < 8 ? q.n : q.c;
    const bool any = (number & 2U) != 0;
    const bool set = (number & 1U) == 0;
    int count = 0;
    for (const bool f : flag) count += f == set ? 1 : 0;
    return any ? count > 0 : count == 16;
  }

  const mir::Function& f_;
  qpu::interp::Memory memory_;
  std::vector<Qpu> qpus_;
  std::array<Vector, 64> vpm_{};
  std::array<int, 16> semaphores_{};
  int interrupts_ = 0;
};

}  // namespace test

#endif
