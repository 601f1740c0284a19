#include "compiler/select_masks.hpp"

#include <array>

namespace qpu::compiler {

using ir::Instruction;
using ir::Kind;
using ir::Value;
using isa::AddOp;
using isa::Cond;

bool MaskSelector::isLeaf(Value mask) const {
  const Instruction& i = graph_.values[mask];
  if (inRegister_.count(mask) != 0) return true;
  if (i.kind == Kind::MaskNot) return isLeaf(i.a);
  return i.kind == Kind::Compare || i.kind == Kind::Constant;
}

std::optional<FlagSets> MaskSelector::sets(Value mask) const {
  const Instruction& i = graph_.values[mask];
  if (mask == flags_.mask) return flags_.sets;
  if (inRegister_.count(mask) != 0 || i.kind == Kind::Constant) return {{kFlagsN, kFlagsZ}};
  switch (i.kind) {
    case Kind::Compare:
      switch (i.test) {
        case ir::Test::Equal: return {{kFlagsZ, kFlagsNone | kFlagsN}};
        case ir::Test::Less:
        case ir::Test::FloatLess:
          return {{kFlagsC | kFlagsZC | kFlagsNC, kFlagsNone | kFlagsZ | kFlagsN}};
      }
      break;
    case Kind::MaskNot: {
      const std::optional<FlagSets> a = sets(i.a);
      if (a) return a->inverse();
      break;
    }
    case Kind::MaskAnd:
    case Kind::MaskOr: {
      const std::optional<FlagSets> inOrder = combined(i, i.a, i.b);
      return inOrder ? inOrder : combined(i, i.b, i.a);
    }
    default: break;
  }
  return std::nullopt;
}

std::optional<FlagSets> MaskSelector::combined(const Instruction& i, Value first, Value second) const {
  if (!isLeaf(second)) return std::nullopt;
  const std::optional<FlagSets> a = sets(first);
  if (!a) return std::nullopt;
  const FlagSets b = *sets(second);
  const FlagSets result = i.kind == Kind::MaskAnd ? both(*a, b) : either(*a, b);
  if (!condition(result)) return std::nullopt;
  return result;
}

void MaskSelector::setFlags(Value mask, Cond cond) {
  const Instruction i = graph_.values[mask];
  const auto known = inRegister_.find(mask);
  if (known != inRegister_.end() || i.kind == Kind::Constant) {
    const Operand m = known != inRegister_.end() ? Operand::reg(known->second) : out_.operand(mask);
    test(out_.emitAdd(AddOp::Or, Operation::kNone, m, m), cond);
    return;
  }
  switch (i.kind) {
    case Kind::MaskNot: setFlags(i.a, cond); return;
    case Kind::Compare: {
      // Max and FMax set flag C where the first operand is greater. A subtraction cannot replace
      // FMax, because Inf - Inf is -Inf.
      static constexpr std::array<AddOp, 3> kOps = {AddOp::Xor, AddOp::Max, AddOp::FMax};
      const bool equal = i.test == ir::Test::Equal;
      const auto [a, b] = equal ? out_.operands(i.a, i.b) : out_.operands(i.b, i.a);
      test(out_.emitAdd(kOps[static_cast<std::size_t>(i.test)], Operation::kNone, a, b), cond);
      return;
    }
    default: {
      // The caller has checked that cond is Always and that the flags of the two operands can be
      // combined.
      const bool inOrder = combined(i, i.a, i.b).has_value();
      const Value first = inOrder ? i.a : i.b;
      const Value second = inOrder ? i.b : i.a;
      const Cond holds = setFlagsTo(first);
      setFlags(second, i.kind == Kind::MaskAnd ? holds : opposite(holds));
      return;
    }
  }
}

void MaskSelector::test(Operation& o, Cond cond) {
  o.setsFlags = true;
  o.cond = cond;
}

Cond MaskSelector::setFlagsTo(Value mask) {
  bool negated = false;
  while (graph_.values[mask].kind == Kind::MaskNot && inRegister_.count(mask) == 0) {
    mask = graph_.values[mask].a;
    negated = !negated;
  }
  if (flags_.mask != mask) {
    std::optional<FlagSets> f = sets(mask);
    if (!f) {
      materialise(graph_.values[mask].a);
      materialise(graph_.values[mask].b);
      f = sets(mask);
    }
    setFlags(mask, Cond::Always);
    flags_ = {mask, *condition(*f), *f};
  }
  return negated ? opposite(flags_.cond) : flags_.cond;
}

void MaskSelector::materialise(Value mask) {
  if (isLeaf(mask) && graph_.values[mask].kind != Kind::Compare &&
      graph_.values[mask].kind != Kind::MaskNot)
    return;
  const Cond holds = setFlagsTo(mask);
  const Vreg r = out_.newRegister();
  out_.load(r, 0);
  out_.load(r, UINT32_MAX, holds);
  inRegister_[mask] = r;
  flags_ = {};
}

}  // namespace qpu::compiler
