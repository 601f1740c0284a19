// Builds machine operations: specific sequences, and random programs.
#ifndef QPU_TESTS_MIR_BUILD_HPP
#define QPU_TESTS_MIR_BUILD_HPP

#include <algorithm>
#include <random>

#include "mir_evaluate.hpp"

namespace mir {

// A kernel whose uniforms are the QPU number, the address of the input and the address of the
// output.
class Builder {
 public:
  Builder() {
    f.name = "made";
    f.parameters = 2;
    f.blocks.emplace_back();
    using Kind = qpu::code::Uniform::Kind;
    f.uniforms = {{Kind::QpuNumber, 0}, {Kind::Argument, 0}, {Kind::Argument, 1}};
    f.spillRow = 60;
    f.qpuNumber = uniform();
    input = uniform();
    output = uniform();
  }

  Function f;
  Vreg input = 0, output = 0;
  std::uint32_t at = 0;  // the block to which operations are appended

  Vreg fresh() { return f.registers++; }
  Block& block() { return f.blocks[at]; }
  Operation& push(Op op) {
    block().operations.emplace_back();
    block().operations.back().op = op;
    return block().operations.back();
  }
  Operation& push(Op op, Vreg target) {
    Operation& o = push(op);
    o.target = target;
    return o;
  }
  // Ends the block with a jump to a new block, which becomes the current block.
  void next() {
    const auto fresh = static_cast<std::uint32_t>(f.blocks.size());
    f.blocks.emplace_back();
    block().exit = Block::Exit::Jump;
    block().next = fresh;
    f.blocks[fresh].loopDepth = block().loopDepth;
    at = fresh;
  }

  Vreg uniform() {
    const Vreg v = fresh();
    push(Op::Uniform, v);
    return v;
  }
  Vreg load(std::uint32_t bits) {
    const Vreg v = fresh();
    push(Op::Load, v).constant = bits;
    return v;
  }
  Vreg elementNumber() {
    const Vreg v = fresh();
    push(Op::ElementNumber, v);
    return v;
  }
  void add(isa::AddOp op, Vreg target, Operand a, Operand b) {
    Operation& o = push(Op::Add, target);
    o.add = op;
    o.a = a;
    o.b = b;
  }
  Vreg add(isa::AddOp op, Operand a, Operand b) {
    const Vreg v = fresh();
    add(op, v, a, b);
    return v;
  }
  Vreg mul(isa::MulOp op, Operand a, Operand b) {
    const Vreg v = fresh();
    Operation& o = push(Op::Mul, v);
    o.mul = op;
    o.a = a;
    o.b = b;
    return v;
  }
  Vreg broadcast(Vreg a, std::uint32_t element) {
    const Vreg v = fresh();
    Operation& o = push(Op::Broadcast, v);
    o.a = Operand::reg(a);
    o.constant = element;
    return v;
  }
  void request(std::uint8_t unit, Vreg address) {
    Operation& o = push(Op::TmuRequest);
    o.unit = unit;
    o.a = Operand::reg(address);
  }
  Vreg receive(std::uint8_t unit) {
    const Vreg v = fresh();
    push(Op::TmuReceive, v).unit = unit;
    return v;
  }
  // Returns the addresses of 16 consecutive words, starting at `base` + `bytes`.
  Vreg vectorAt(Vreg base, std::uint32_t bytes) {
    const Vreg e = elementNumber();
    const Vreg b = add(isa::AddOp::Shl, Operand::reg(e), Operand::imm(2));
    const Vreg c = load(bytes);
    const Vreg d = add(isa::AddOp::Add, Operand::reg(base), Operand::reg(b));
    return add(isa::AddOp::Add, Operand::reg(d), Operand::reg(c));
  }
  void setup(Op op, std::uint32_t word) { push(op).a = Operand::reg(load(word)); }
  void store(Vreg v, std::uint32_t bytes, std::uint32_t row = 4) {
    setup(Op::VpmWriteSetup, 0xa00U | (1U << 12U) | row);
    push(Op::VpmWrite).a = Operand::reg(v);
    setup(Op::VpmWriteSetup, 0x80804000U | (16U << 16U) | (row << 7U));
    const Vreg offset = load(bytes);
    const Vreg address = add(isa::AddOp::Add, Operand::reg(output), Operand::reg(offset));
    push(Op::DmaStoreStart).a = Operand::reg(address);
    push(Op::DmaStoreWait);
  }
};

// Options for a random program with several variables, conditions, loops, and branches whose paths
// join again. At the end, the program stores all variables.
struct RandomOptions {
  int variables = 10;
  int operations = 60;
  int loops = 0;
  bool tmus = true;
  bool sfu = true;
};

class Random : public Builder {
 public:
  Random(std::uint32_t seed, const RandomOptions& options) : options_(options), engine_(seed) {
    f.usesTwoTmus = options.tmus;
    for (int k = 0; k < options.variables; ++k) {
      const Vreg v = fresh();
      variables_.push_back(v);
      if (k == 0)
        push(Op::ElementNumber, v);
      else if (k % 3 == 1)
        push(Op::Load, v).constant = static_cast<std::uint32_t>(engine_());
      else
        add(isa::AddOp::Xor, v, Operand::reg(variables_[pick(k)]), Operand::imm(7));
    }
    address_ = vectorAt(input, 0);
    const int parts = options.loops * 2 + 1;
    for (int part = 0; part < parts; ++part) {
      if (part % 2 == 1) {
        loop(options.operations / parts);
      } else {
        operations(options.operations / parts);
        if (options.loops > 0) diamond(options.operations / parts / 4 + 1);
      }
    }
    for (int k = 0; k < options.variables; ++k)
      store(variables_[static_cast<std::size_t>(k)], static_cast<std::uint32_t>(k) * 64,
            static_cast<std::uint32_t>(4 + k % 3));
    block().exit = Block::Exit::End;
  }

 private:
  std::size_t pick(int n) { return static_cast<std::size_t>(engine_() % static_cast<unsigned>(n)); }
  Vreg any() { return variables_[pick(options_.variables)]; }
  Operand operand() {
    static constexpr std::array<std::uint32_t, 6> kSmall{0, 3, 15, 0xfffffff0U, 0x3f800000U,
                                                         0x3b800000U};
    if (pick(5) == 0) return Operand::imm(kSmall[pick(6)]);
    return Operand::reg(any());
  }

  void operations(int count) {
    bool haveFlags = false;
    for (int k = 0; k < count; ++k) operation(haveFlags);
    while (outstanding_[0] + outstanding_[1] > 0) receiveOne();
  }

  void receiveOne() {
    const std::uint8_t unit = outstanding_[0] > 0 ? 0 : 1;
    push(Op::TmuReceive, any()).unit = unit;
    --outstanding_[unit];
  }

  void operation(bool& haveFlags) {
    static constexpr std::array<isa::AddOp, 19> kAdds{
        isa::AddOp::FAdd, isa::AddOp::FSub,  isa::AddOp::FMin, isa::AddOp::FMax, isa::AddOp::FtoI,
        isa::AddOp::ItoF, isa::AddOp::Add,   isa::AddOp::Sub,  isa::AddOp::Shr,  isa::AddOp::Asr,
        isa::AddOp::Ror,  isa::AddOp::Shl,   isa::AddOp::Min,  isa::AddOp::Max,  isa::AddOp::And,
        isa::AddOp::Or,   isa::AddOp::Xor,   isa::AddOp::Not,  isa::AddOp::V8AddS};
    static constexpr std::array<isa::MulOp, 5> kMuls{isa::MulOp::FMul, isa::MulOp::Mul24,
                                                     isa::MulOp::V8Min, isa::MulOp::V8AddS,
                                                     isa::MulOp::V8SubS};
    switch (pick(14)) {
      case 0: case 1: case 2: case 3: {
        Operation& o = push(Op::Add, any());
        o.add = kAdds[pick(19)];
        fill(o, haveFlags, true);
        break;
      }
      case 4: case 5: case 6: case 7: {
        Operation& o = push(Op::Mul, any());
        o.mul = kMuls[pick(5)];
        fill(o, haveFlags, true);
        break;
      }
      case 8: {
        Operation& o = push(Op::Move, any());
        fill(o, haveFlags, false);
        break;
      }
      case 9: {
        Operation& o = push(Op::Rotate, any());
        o.a = Operand::reg(any());
        o.b = pick(2) == 0 ? Operand::reg(any())
                           : Operand::imm(static_cast<std::uint32_t>(1 + pick(15)));
        break;
      }
      case 10: {
        Operation& o = push(Op::Broadcast, any());
        o.a = Operand::reg(any());
        o.constant = static_cast<std::uint32_t>(pick(16));
        break;
      }
      case 11: {
        if (!options_.sfu) break;
        Operation& o = push(Op::Sfu, any());
        o.a = Operand::reg(any());
        o.constant = static_cast<std::uint32_t>(52 + pick(4));
        break;
      }
      case 12: {
        if (!options_.tmus) break;
        const auto unit = static_cast<std::uint8_t>(pick(2));
        if (outstanding_[unit] == 4) {
          receiveOne();
          break;
        }
        request(unit, vectorAt(input, static_cast<std::uint32_t>(64 * pick(8))));
        ++outstanding_[unit];
        break;
      }
      default:
        if (outstanding_[0] + outstanding_[1] > 0) {
          receiveOne();
        } else {
          Operation& o = push(Op::Load, any());
          o.constant = static_cast<std::uint32_t>(engine_());
          condition(o, haveFlags);
        }
    }
  }

  void condition(Operation& o, bool haveFlags) {
    static constexpr std::array<isa::Cond, 4> kConds{isa::Cond::ZSet, isa::Cond::ZClear,
                                                     isa::Cond::NSet, isa::Cond::NClear};
    if (haveFlags && pick(3) == 0) o.cond = kConds[pick(4)];
  }
  void fill(Operation& o, bool& haveFlags, bool two) {
    o.a = operand();
    o.b = o.a;
    if (two && pick(8) != 0) {
      o.b = operand();
      if (!o.a.isRegister() && !o.b.isRegister()) o.b = Operand::reg(any());
    }
    if (!two) o.b = {};
    condition(o, haveFlags);
    if (pick(6) == 0 && (haveFlags || o.cond == isa::Cond::Always)) {
      o.setsFlags = true;
      haveFlags = true;
      if (pick(2) == 0) {
        o.target = Operation::kNone;
      }
    }
  }

  void loop(int count) {
    const Vreg counter = load(3);
    next();
    const std::uint32_t head = at;
    ++block().loopDepth;
    operations(count / 2);
    if (pick(2) == 0) diamond(count / 4 + 1);
    operations(count / 2);
    add(isa::AddOp::Sub, counter, Operand::reg(counter), Operand::imm(1));
    block().operations.back().setsFlags = true;
    const std::uint32_t from = at;
    next();
    f.blocks[from].exit = Block::Exit::Branch;
    f.blocks[from].cond = isa::BranchCond::AnyZClear;
    f.blocks[from].taken = head;
    --block().loopDepth;
  }

  void diamond(int count) {
    static constexpr std::array<isa::BranchCond, 4> kConds{
        isa::BranchCond::AllZSet, isa::BranchCond::AnyZSet, isa::BranchCond::AllNClear,
        isa::BranchCond::AnyNSet};
    Operation& o = push(Op::Add);
    o.add = isa::AddOp::Sub;
    o.a = Operand::reg(any());
    o.b = Operand::reg(any());
    o.setsFlags = true;
    const std::uint32_t from = at;
    next();
    const std::uint32_t then = at;
    operations(count);
    next();
    const std::uint32_t other = at;
    operations(count);
    next();
    f.blocks[then].next = at;
    f.blocks[from].exit = Block::Exit::Branch;
    f.blocks[from].cond = kConds[pick(4)];
    f.blocks[from].taken = other;
  }

  RandomOptions options_;
  std::mt19937 engine_;
  std::vector<Vreg> variables_;
  Vreg address_ = 0;
  std::array<int, 2> outstanding_{};
};

// Returns the loop of a matrix product with `steps` steps per iteration. A step broadcasts `rows`
// elements of one vector, multiplies `vectors` vectors by these elements, and updates `rows` x
// `vectors` sums.
inline Function matrixBlock(int rows, int vectors, int steps) {
  Builder b;
  b.f.usesTwoTmus = true;
  std::vector<Vreg> sums;
  for (int k = 0; k < rows * vectors; ++k) sums.push_back(b.load(0));
  const Vreg row = b.vectorAt(b.input, 0);
  std::vector<Vreg> columns;
  for (int j = 0; j < vectors; ++j)
    columns.push_back(b.vectorAt(b.input, static_cast<std::uint32_t>(64 * (j + 1))));
  const Vreg stride = b.load(64);
  const Vreg counter = b.load(4);
  const auto requests = [&] {
    b.request(0, row);
    for (int j = 0; j < vectors; ++j)
      b.request(static_cast<std::uint8_t>((j + 1) % 2), columns[static_cast<std::size_t>(j)]);
    b.add(isa::AddOp::Add, row, Operand::reg(row), Operand::reg(stride));
    for (const Vreg c : columns) b.add(isa::AddOp::Add, c, Operand::reg(c), Operand::reg(stride));
  };
  requests();
  b.next();
  const std::uint32_t head = b.at;
  b.block().loopDepth = 1;
  for (int s = 0; s < steps; ++s) {
    const Vreg a = b.receive(0);
    std::vector<Vreg> x;
    for (int j = 0; j < vectors; ++j) x.push_back(b.receive(static_cast<std::uint8_t>((j + 1) % 2)));
    requests();
    for (int i = 0; i < rows; ++i) {
      const Vreg one = b.broadcast(a, static_cast<std::uint32_t>(i));
      for (int j = 0; j < vectors; ++j) {
        const Vreg c = sums[static_cast<std::size_t>(i * vectors + j)];
        const Vreg p = b.mul(isa::MulOp::FMul, Operand::reg(one),
                             Operand::reg(x[static_cast<std::size_t>(j)]));
        b.add(isa::AddOp::FAdd, c, Operand::reg(c), Operand::reg(p));
      }
    }
  }
  b.add(isa::AddOp::Sub, counter, Operand::reg(counter), Operand::imm(1));
  b.block().operations.back().setsFlags = true;
  const std::uint32_t from = b.at;
  b.next();
  b.f.blocks[from].exit = Block::Exit::Branch;
  b.f.blocks[from].cond = isa::BranchCond::AnyZClear;
  b.f.blocks[from].taken = head;
  b.receive(0);
  for (int j = 0; j < vectors; ++j) b.receive(static_cast<std::uint8_t>((j + 1) % 2));
  for (int k = 0; k < rows * vectors; ++k)
    b.store(sums[static_cast<std::size_t>(k)], static_cast<std::uint32_t>(64 * k));
  b.block().exit = Block::Exit::End;
  return b.f;
}

}  // namespace mir

#endif
