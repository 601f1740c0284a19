#include "compiler/coalesce_recurrences.hpp"

#include <algorithm>

#include "compiler/liveness.hpp"

namespace qpu::compiler {
namespace {

constexpr std::uint32_t kNever = UINT32_MAX;

bool isPlain(const Operation& o) {
  return (o.op == Op::Add || o.op == Op::Mul) && o.cond == isa::Cond::Always &&
         o.target != Operation::kNone;
}

class RecurrenceCoalescer {
 public:
  explicit RecurrenceCoalescer(Function& f)
      : f_(f), live_(findLiveness(f)), writes_(f.registers), lastRead_(f.registers),
        after_(f.registers) {
    for (const Block& b : f.blocks)
      for (const Operation& o : b.operations)
        if (o.target != Operation::kNone) ++writes_[o.target];
  }

  void run() {
    for (std::size_t b = 0; b < f_.blocks.size(); ++b) block(b);
  }

 private:
  // The positions of a later read and of the next write of a register that is live across blocks.
  struct NextAccess {
    std::uint32_t read = kNever;  // a read before the next write, or kNever
    std::uint32_t write = kNever;
  };

  void block(std::size_t b) {
    std::vector<Operation>& operations = f_.blocks[b].operations;
    const auto end = static_cast<std::uint32_t>(operations.size());
    for (const Vreg v : live_.globals) after_[v] = {live_.liveOut(b, v) ? end : kNever, kNever};
    // Indexed by operation. Each entry contains one element for each of the operation's two
    // operands.
    std::vector<std::array<NextAccess, 2>> later(end);
    for (std::uint32_t i = end; i-- > 0;) {
      const Operation& o = operations[i];
      if (o.a.isRegister()) later[i][0] = after_[o.a.value];
      if (o.b.isRegister()) later[i][1] = after_[o.b.value];
      if (o.target != Operation::kNone) after_[o.target] = {kNever, i};
      forEachRead(o, [&](Vreg v) { after_[v].read = i; });
    }
    for (std::uint32_t i = 0; i < end; ++i)
      forEachRead(operations[i], [&](Vreg v) { lastRead_[v] = i; });

    replaced_.assign(f_.registers, {kNever, kNever});
    for (std::uint32_t i = 0; i < end; ++i) {
      Operation& o = operations[i];
      std::array<NextAccess, 2> next = later[i];
      std::size_t side = 0;
      for (Operand* operand : {&o.a, &o.b}) {
        if (operand->isRegister() && replaced_[operand->value].by != kNever) {
          // Another register replaces the operand, so the position of the next write to the other
          // register is needed.
          next[side] = {lastRead_[operand->value] > i ? lastRead_[operand->value] : kNever,
                        replaced_[operand->value].write};
          operand->value = replaced_[operand->value].by;
        }
        ++side;
      }
      if (isPlain(o)) coalesce(o, next);
    }
  }

  void coalesce(Operation& o, const std::array<NextAccess, 2>& next) {
    if (live_.indexOf[o.target] != Liveness::kLocal || writes_[o.target] != 1) return;
    std::size_t side = 0;
    for (const Operand* operand : {&o.a, &o.b}) {
      const NextAccess& after = next[side++];
      if (!operand->isRegister() || live_.indexOf[operand->value] == Liveness::kLocal) continue;
      if (operand->value == f_.qpuNumber || after.read != kNever) continue;
      if (after.write != kNever && lastRead_[o.target] > after.write) continue;
      replaced_[o.target] = {operand->value, after.write};
      o.target = operand->value;
      return;
    }
  }

  struct Replacement {
    std::uint32_t by;     // the register that replaces this register
    std::uint32_t write;  // the position at which that register is next written
  };

  Function& f_;
  const Liveness live_;
  std::vector<std::uint32_t> writes_, lastRead_;
  std::vector<NextAccess> after_;
  std::vector<Replacement> replaced_;
};

}  // namespace

void coalesceRecurrences(Function& function) { RecurrenceCoalescer(function).run(); }

}  // namespace qpu::compiler
