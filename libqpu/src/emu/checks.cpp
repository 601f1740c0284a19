// Checks the rules that depend on values, by examining the data that an instruction reads and
// writes.
#include "emu/failure.hpp"

namespace qpu::emu {

using isa::AddOp;
using isa::Cond;
using isa::Form;
using isa::Instruction;
using isa::MulOp;

// Both ALUs may write the same peripheral if they write the same value. Some published programs end
// with such an instruction.
void Machine::requireEqual(const Qpu& q, std::uint32_t at, const Vector& x, const Vector& y,
                           Mask where) const {
  for (std::size_t e = 0; e < kElements; ++e)
    if ((where >> e & 1U) != 0 && x.e[e] != y.e[e])
      fail<ExecutionError>(q, at,
                           "both ALUs write the same accumulator or peripheral, and element " +
                               std::to_string(e) + " differs: " + detail::hex(x.e[e]) + " and " +
                               detail::hex(y.e[e]));
}

// Returns the rule that instruction `at` breaks by rotating an accumulator that the previous
// instruction has written, or null. It is not defined whether the rotation reads the old or the
// new value. The instruction breaks no rule if the two values are equal.
const char* Machine::rotatesChanged(const Qpu& q, std::uint32_t at, std::uint32_t before) const {
  const Traits& t = program_->traits[at];
  const std::uint32_t affected = rotatedTooSoon(program_->traits[before], t);
  const Vector* const now = q.v + slot::kAccumulators;
  for (std::size_t n = 0; n < q.old.size(); ++n)
    if (((affected & t.rotated) >> n & 1U) != 0 && q.old[n].e != now[n].e)
      return "an accumulator is rotated in the instruction after the one that changes it";
  if (t.rotatesByR5 && affected >> 5U != 0 && ((q.old[5].e[0] ^ now[5].e[0]) & 15U) != 0)
    return "a rotation by r5 is in the instruction after the one that changes r5";
  return nullptr;
}

// Tracks poison, which marks a register's value as unusable after some loads. A move copies the
// poison to its target. Any other use of the value is an error.
void Machine::followPoison(Qpu& q, const Op& op, std::uint32_t at) {
  const Instruction& i = program_->instructions[at];
  const auto of = [&](std::uint16_t s) {
    return s < slot::kRegisters ? q.poison[s] : PoisonNumber{0};
  };
  // addPlain and mulPlain are true if the pipe can copy its operand without changing or testing it.
  // The ADD pipe sets the flags. If the ADD pipe does nothing, the MUL pipe sets the flags. Only
  // the MUL pipe rotates. Either pipe can pack.
  const bool alu = i.form == Form::Alu;
  const bool flags = (op.after & need::kFlags) != 0;
  const bool packs = (op.after & need::kPack) != 0;
  const bool addPlain = alu && !flags && !(packs && !i.pm && addWritesA(i));
  const bool mulPlain = alu && !(flags && op.add == 0) && !(packs && (i.pm || mulWritesA(i))) &&
                        (op.after & need::kRotate) == 0;
  const auto result = [&](bool moves, bool plain, std::uint16_t a, std::uint16_t b,
                          std::uint16_t target, std::uint8_t address) -> PoisonNumber {
    const bool copied = moves && a == b && plain &&
                      (target != slot::kNowhere || address == isa::address::kNop);
    if (copied) return of(a);
    for (const std::uint16_t s : {a, b})
      if (of(s) != 0) failPoisoned(q, at, of(s));
    return 0;
  };
  if (i.form == Form::Branch) {
    if (i.branchRegister && of(slot::kFileA + i.branchRegisterA) != 0)
      failPoisoned(q, at, of(slot::kFileA + i.branchRegisterA));
    return;
  }
  if ((op.before & need::kUnpack) != 0) {
    const auto from =
        static_cast<std::uint16_t>(i.pm ? slot::kR4 : slot::kFileA + i.raddrA);
    if (of(from) != 0) failPoisoned(q, at, of(from));
  }
  const auto add = static_cast<AddOp>(op.add);
  PoisonNumber x = 0;
  PoisonNumber y = 0;
  if (op.add != 0)
    x = result(add == AddOp::Or || add == AddOp::And || add == AddOp::FMin || add == AddOp::FMax,
               addPlain, op.addA, op.addB, op.addTarget, i.waddrAdd);
  if (op.mul != MulOp::Nop)
    y = result(op.mul == MulOp::V8Min || op.mul == MulOp::V8Max, mulPlain, op.mulA, op.mulB,
               op.mulTarget, i.waddrMul);
  if (op.add != 0) setPoison(q, op.addTarget, x, i.condAdd == Cond::Always);
  if (op.mul != MulOp::Nop) setPoison(q, op.mulTarget, y, i.condMul == Cond::Always);
}

// If `whole` is true, the old value is overwritten completely.
void Machine::setPoison(Qpu& q, std::uint16_t target, PoisonNumber poison, bool whole) {
  if (target >= slot::kRegisters) return;
  PoisonNumber& p = q.poison[target];
  if (poison == 0 && !whole) return;
  q.poisoned += (poison != 0 ? 1U : 0U) - (p != 0 ? 1U : 0U);
  p = poison;
}

}  // namespace qpu::emu
