// Instruction selection: intermediate representation to machine operations. Masks are not computed: flags are set where
// a mask is needed, unless they already represent it.
//
// Phis are eliminated with copies at the end of the predecessors and the start of the block: Vugranam C. Sreedhar, Roy
// Dz-Ching Ju, David M. Gillies and Vatsa Santhanam, "Translating Out of Static Single Assignment Form", 1999. The
// copies are coalesced later.
#include <algorithm>
#include <array>
#include <cassert>
#include <unordered_map>
#include <utility>

#include "compiler/compile.hpp"
#include "compiler/flags.hpp"
#include "compiler/immediates.hpp"
#include "compiler/ir.hpp"
#include "compiler/lower.hpp"
#include "compiler/mir_text.hpp"
#include "compiler/optimise.hpp"
#include "compiler/coalesce.hpp"

namespace qpu::compiler {
namespace {

using ir::Graph;
using ir::Instruction;
using ir::Kind;
using ir::kNone;
using ir::Value;
using isa::AddOp;
using isa::Cond;

isa::BranchCond branchCondition(Cond c, bool all) {
  using isa::BranchCond;
  switch (c) {
    case Cond::ZSet: return all ? BranchCond::AllZSet : BranchCond::AnyZSet;
    case Cond::ZClear: return all ? BranchCond::AllZClear : BranchCond::AnyZClear;
    case Cond::NSet: return all ? BranchCond::AllNSet : BranchCond::AnyNSet;
    case Cond::NClear: return all ? BranchCond::AllNClear : BranchCond::AnyNClear;
    case Cond::CSet: return all ? BranchCond::AllCSet : BranchCond::AnyCSet;
    case Cond::CClear: return all ? BranchCond::AllCClear : BranchCond::AnyCClear;
    case Cond::Never:
    case Cond::Always: break;
  }
  return BranchCond::Always;
}

class Selection {
 public:
  explicit Selection(Graph& graph) : graph_(graph) {}

  Function run() {
    function_.name = graph_.name;
    function_.parameters = graph_.parameters;
    function_.usesTwoTmus = graph_.usesTwoTmus;
    function_.usesVpmByHand = graph_.usesVpmByHand;
    function_.keepsWriteWindow = graph_.keepsWriteWindow;
    function_.mergesStores = graph_.mergesStores;
    function_.spillRow = graph_.spillRow;
    function_.spillRowStride = graph_.spillRowStride;
    function_.qpuNumber = graph_.qpuNumber;
    registers_ = static_cast<Vreg>(graph_.values.size());
    function_.blocks.resize(graph_.blocks.size());
    countUses();
    prepareUniforms();
    preparePhis();
    for (std::uint32_t b = 0; b < graph_.blocks.size(); ++b) block(b);
    function_.sites = std::move(graph_.sites);
    function_.registers = registers_;
    return std::move(function_);
  }

 private:
  // --- preparation ---

  void countUses() {
    uses_.assign(graph_.values.size(), 0);
    for (const ir::Block& b : graph_.blocks) {
      for (const Value v : b.body) forOperands(graph_.values[v], [&](Value o) { ++uses_[o]; });
      for (const Value phi : b.phis)
        for (const Value o : graph_.arguments(phi)) ++uses_[o];
      if (b.condition != kNone) ++uses_[b.condition];
    }
    // If a Select is the only use of a result, the result is computed there under the condition of the Select.
    fused_.assign(graph_.values.size(), false);
    for (const ir::Block& b : graph_.blocks)
      for (const Value v : b.body) {
        const Instruction& i = graph_.values[v];
        if (i.kind != Kind::Select) continue;
        fused_[i.a] = canFuse(i.a, i);
        if (!fused_[i.a]) fused_[i.b] = canFuse(i.b, i);
      }
  }

  bool canFuse(Value v, const Instruction& into) const {
    const Instruction& i = graph_.values[v];
    return (i.kind == Kind::Alu || i.kind == Kind::Mul) && uses_[v] == 1 && i.block == into.block;
  }

  // Unused arguments are not in the uniform stream.
  void prepareUniforms() {
    out_ = &function_.blocks[0].operations;
    for (Value v = 0; v < graph_.values.size(); ++v) {
      const Instruction& i = graph_.values[v];
      if (i.kind != Kind::Uniform) continue;
      const code::Uniform& u = graph_.uniforms[i.bits];
      if (u.kind == code::Uniform::Kind::Argument && uses_[v] == 0) continue;
      function_.uniforms.push_back(u);
      emit(Op::Uniform, v);
    }
  }

  // Each phi gets a register that all predecessors write and the start of the block reads. Critical edges are split,
  // except the back edges of loops: there it would cost a jump per iteration.
  void preparePhis() {
    phiRegister_.assign(graph_.values.size(), kNone);
    for (const ir::Block& b : graph_.blocks)
      for (const Value phi : b.phis) phiRegister_[phi] = registers_++;
  }

  // --- operations ---

  Operation& emit(Op op, Vreg target = Operation::kNone) {
    Operation o;
    o.op = op;
    o.target = target;
    o.site = site_;
    out_->push_back(o);
    return out_->back();
  }

  Operation& emitAdd(AddOp op, Vreg target, Operand a, Operand b) {
    Operation& o = emit(Op::Add, target);
    o.add = op;
    o.a = a;
    o.b = b;
    return o;
  }

  void load(Vreg target, std::uint32_t bits, Cond cond = Cond::Always) {
    if (isImmediate(bits)) {
      Operation& o = emit(Op::Move, target);
      o.a = Operand::imm(bits);
      o.cond = cond;
    } else {
      Operation& o = emit(Op::Load, target);
      o.constant = bits;
      o.cond = cond;
    }
  }

  void move(Vreg target, Value from, Cond cond = Cond::Always) {
    if (graph_.isConstant(from)) return load(target, graph_.values[from].bits, cond);
    Operation& o = emit(Op::Move, target);
    o.a = Operand::reg(from);
    o.cond = cond;
  }

  Operand inRegister(Value v) {
    if (!graph_.isConstant(v)) return Operand::reg(v);
    const std::uint32_t bits = graph_.values[v].bits;
    const auto [entry, isNew] = constants_.try_emplace(bits, registers_);
    if (isNew) load(registers_++, bits);
    return Operand::reg(entry->second);
  }

  Operand operand(Value v) {
    if (graph_.isConstant(v) && isImmediate(graph_.values[v].bits))
      return Operand::imm(graph_.values[v].bits);
    return inRegister(v);
  }

  // An operation can have only one immediate.
  std::pair<Operand, Operand> operands(Value a, Value b) {
    const Operand y = operand(b);
    const bool same = a == b || !graph_.isConstant(a) || !graph_.isConstant(b) ||
                      graph_.values[a].bits == graph_.values[b].bits;
    return {y.isRegister() || same ? operand(a) : inRegister(a), y};
  }

  static bool isOfOne(AddOp op) {
    return op == AddOp::Not || op == AddOp::ItoF || op == AddOp::FtoI;
  }

  void alu(const Instruction& i, Vreg target, Cond cond) {
    if (isOfOne(i.add)) {
      const Operand a = operand(i.a);
      emitAdd(i.add, target, a, a).cond = cond;
      return;
    }
    if (graph_.isConstant(i.b) && !graph_.isConstant(i.a)) {
      const auto [op, bits] = withConstant(i.add, graph_.values[i.b].bits);
      if (isImmediate(bits)) {
        emitAdd(op, target, operand(i.a), Operand::imm(bits)).cond = cond;
        return;
      }
    }
    const auto [a, b] = operands(i.a, i.b);
    emitAdd(i.add, target, a, b).cond = cond;
  }

  // Computes v into `target`.
  void compute(Value v, Vreg target, Cond cond) {
    const Instruction i = graph_.values[v];
    if (i.kind == Kind::Alu) return alu(i, target, cond);
    const auto [a, b] = operands(i.a, i.b);
    Operation& o = emit(Op::Mul, target);
    o.mul = i.mul;
    o.a = a;
    o.b = b;
    o.cond = cond;
  }

  // --- masks ---

  // The mask that the flags represent.
  struct FlagState {
    Value mask = kNone;
    Cond cond = Cond::Always;
    FlagSets sets;
  };

  bool isLeaf(Value mask) const {
    const Instruction& i = graph_.values[mask];
    if (inRegister_.count(mask) != 0) return true;
    if (i.kind == Kind::MaskNot) return isLeaf(i.a);
    return i.kind == Kind::Compare || i.kind == Kind::Constant;
  }

  std::optional<FlagSets> sets(Value mask) const {
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
      case Kind::MaskOr: return combined(i, i.a, i.b) ? combined(i, i.a, i.b) : combined(i, i.b, i.a);
      default: break;
    }
    return std::nullopt;
  }

  // Flags after comparing `first`, then `second`, if one condition then represents the result.
  std::optional<FlagSets> combined(const Instruction& i, Value first, Value second) const {
    if (!isLeaf(second)) return std::nullopt;
    const std::optional<FlagSets> a = sets(first);
    if (!a) return std::nullopt;
    const FlagSets b = *sets(second);
    const FlagSets result = i.kind == Kind::MaskAnd ? both(*a, b) : either(*a, b);
    if (!condition(result)) return std::nullopt;
    return result;
  }

  // Sets the flags of the elements for which `cond` holds.
  void setFlags(Value mask, Cond cond) {
    const Instruction i = graph_.values[mask];
    const auto known = inRegister_.find(mask);
    if (known != inRegister_.end() || i.kind == Kind::Constant) {
      const Operand m = known != inRegister_.end() ? Operand::reg(known->second) : operand(mask);
      test(emitAdd(AddOp::Or, Operation::kNone, m, m), cond);
      return;
    }
    switch (i.kind) {
      case Kind::MaskNot: setFlags(i.a, cond); return;
      case Kind::Compare: {
        // A maximum sets C where its first operand is greater. A difference does not work for floats: Inf - Inf is
        // -Inf.
        static constexpr std::array<AddOp, 3> kOps = {AddOp::Xor, AddOp::Max, AddOp::FMax};
        const bool equal = i.test == ir::Test::Equal;
        const auto [a, b] = equal ? operands(i.a, i.b) : operands(i.b, i.a);
        test(emitAdd(kOps[static_cast<std::size_t>(i.test)], Operation::kNone, a, b), cond);
        return;
      }
      default: {
        // The caller has checked that cond is Always and that the operands can be combined.
        const bool inOrder = combined(i, i.a, i.b).has_value();
        const Value first = inOrder ? i.a : i.b;
        const Value second = inOrder ? i.b : i.a;
        const Cond holds = setFlagsTo(first);
        setFlags(second, i.kind == Kind::MaskAnd ? holds : opposite(holds));
        return;
      }
    }
  }

  static void test(Operation& o, Cond cond) {
    o.setsFlags = true;
    o.cond = cond;
  }

  // Makes the flags represent the mask. Returns the condition under which it holds.
  Cond setFlagsTo(Value mask) {
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

  // Computes the mask into a register: all bits are set where it holds.
  void materialise(Value mask) {
    if (isLeaf(mask) && graph_.values[mask].kind != Kind::Compare &&
        graph_.values[mask].kind != Kind::MaskNot)
      return;
    const Cond holds = setFlagsTo(mask);
    const Vreg r = registers_++;
    load(r, 0);
    load(r, UINT32_MAX, holds);
    inRegister_[mask] = r;
    flags_ = {};
  }

  // --- blocks ---

  void select(Value v, const Instruction& i) {
    const Cond holds = setFlagsTo(i.c);
    const bool aFirst = !graph_.isConstant(i.a) && !fused_[i.a] &&
                          (graph_.isConstant(i.b) || fused_[i.b]);
    const Value first = aFirst ? i.a : i.b;
    const Value second = aFirst ? i.b : i.a;
    put(v, first, Cond::Always);
    put(v, second, aFirst ? opposite(holds) : holds);
  }

  void put(Vreg target, Value v, Cond cond) {
    if (fused_[v])
      compute(v, target, cond);
    else
      move(target, v, cond);
  }

  void instruction(Value v) {
    const Instruction i = graph_.values[v];
    site_ = i.site;
    switch (i.kind) {
      case Kind::Element: emit(Op::ElementNumber, v); return;
      case Kind::Literal: return load(v, i.bits);
      case Kind::Alu:
      case Kind::Mul:
        if (!fused_[v]) compute(v, v, Cond::Always);
        return;
      case Kind::Rotate: return rotate(v, i);
      case Kind::Broadcast:
      case Kind::Sfu: {
        const Operand a = inRegister(i.a);
        Operation& o = emit(i.kind == Kind::Sfu ? Op::Sfu : Op::Broadcast, v);
        o.a = a;
        o.constant = i.bits;
        return;
      }
      case Kind::Select: return select(v, i);
      case Kind::Effect: {
        const Operand a = i.a == kNone ? Operand{} : operand(i.a);
        Operation& o = emit(i.op, hasResult(i) ? v : Operation::kNone);
        o.a = a;
        o.constant = i.bits;
        o.unit = i.unit;
        return;
      }
      case Kind::Compare:
      case Kind::MaskAnd:
      case Kind::MaskOr:
      case Kind::MaskNot:
      case Kind::Constant:
      case Kind::Uniform:
      case Kind::Phi:
      case Kind::Load: return;
    }
  }

  void rotate(Value v, const Instruction& i) {
    if (graph_.isConstant(i.b) && (graph_.values[i.b].bits & 15U) == 0) return move(v, i.a);
    const Operand a = inRegister(i.a);
    Operand by = Operand::reg(i.b);
    if (graph_.isConstant(i.b)) by = Operand::imm(graph_.values[i.b].bits & 15U);
    Operation& o = emit(Op::Rotate, v);
    o.a = a;
    o.b = by;
  }

  // Copies the arguments of the phis of `b` for its predecessor number `pred`.
  void addPhiCopies(const ir::Block& b, std::size_t pred) {
    for (const Value phi : b.phis) move(phiRegister_[phi], graph_.arguments(phi)[pred]);
  }

  std::size_t predecessorNumber(std::uint32_t from, std::uint32_t to) const {
    const std::vector<std::uint32_t>& preds = graph_.blocks[to].preds;
    return static_cast<std::size_t>(std::find(preds.begin(), preds.end(), from) - preds.begin());
  }

  // The target of a branch from `from` to `to`: a new block if the edge is split for phi copies.
  std::uint32_t splitEdge(std::uint32_t from, std::uint32_t to) {
    const ir::Block& b = graph_.blocks[to];
    if (b.phis.empty()) return to;
    if (to <= from) {
      addPhiCopies(b, predecessorNumber(from, to));
      return to;
    }
    const auto between = static_cast<std::uint32_t>(function_.blocks.size());
    function_.blocks.emplace_back();
    Block& block = function_.blocks.back();
    block.exit = Block::Exit::Jump;
    block.next = to;
    block.loopDepth = std::min(graph_.depth(from), graph_.depth(to));
    out_ = &block.operations;
    addPhiCopies(b, predecessorNumber(from, to));
    out_ = &function_.blocks[from].operations;
    return between;
  }

  void block(std::uint32_t number) {
    const ir::Block& b = graph_.blocks[number];
    out_ = &function_.blocks[number].operations;
    constants_.clear();
    inRegister_.clear();
    flags_ = {};
    for (const Value phi : b.phis) {
      Operation& o = emit(Op::Move, phi);
      o.a = Operand::reg(phiRegister_[phi]);
    }
    for (const Value v : b.body) instruction(v);
    site_ = b.site;
    Block& block = function_.blocks[number];
    block.loopDepth = graph_.depth(number);
    block.site = b.site;
    switch (b.exit) {
      case ir::Block::Exit::End: block.exit = Block::Exit::End; return;
      case ir::Block::Exit::Jump:
        block.exit = Block::Exit::Jump;
        block.next = b.next;
        addPhiCopies(graph_.blocks[b.next], predecessorNumber(number, b.next));
        return;
      case ir::Block::Exit::Branch: break;
    }
    block.exit = Block::Exit::Branch;
    Cond holds = setFlagsTo(b.condition);
    bool all = b.all;
    const std::uint32_t yes = splitEdge(number, b.taken);
    const std::uint32_t no = splitEdge(number, b.next);
    Block& done = function_.blocks[number];
    done.taken = yes;
    done.next = no;
    if (b.taken == number + 1) {
      std::swap(done.taken, done.next);
      holds = opposite(holds);
      all = !all;
    }
    done.cond = branchCondition(holds, all);
  }

  Graph& graph_;
  Function function_;
  Vreg registers_ = 0;
  std::vector<std::uint32_t> uses_;
  std::vector<bool> fused_;
  std::vector<Vreg> phiRegister_;
  std::vector<Operation>* out_ = nullptr;
  std::uint32_t site_ = code::Object::kNoSite;
  // Of the current block.
  FlagState flags_;
  std::unordered_map<std::uint32_t, Vreg> constants_;
  std::unordered_map<Value, Vreg> inRegister_;  // masks
};

}  // namespace

namespace {

// Registers that are reserved for short-lived values.
constexpr int kReservedWhenHoisting = 20;
constexpr int kReserved = 12;

std::uint32_t pressureLimit(const Options& options, int reserved) {
  return static_cast<std::uint32_t>(std::max(2 * options.fileRegisters - reserved, 4));
}

}  // namespace

Function select(const detail::Source& source, const Options& options) {
  Graph graph = lower(source, options);
  simplifyPhis(graph);
  eliminateDeadCode(graph);
  lowerLoads(graph, options.level > 0 ? strides(graph) : std::vector<Stride>{});
  if (options.level > 1) {
    const std::uint32_t limit = pressureLimit(options, kReservedWhenHoisting);
    reduceStrength(graph, limit);
    eliminateDeadCode(graph);
    hoistInvariants(graph, limit);
    hoistConstants(graph, limit);
    rematerialiseValues(graph, pressureLimit(options, kReserved));
  }
  eliminateDeadCode(graph);
  Function function = Selection(graph).run();
  coalesceCopies(function);
  assert(check(function).empty());
  return function;
}

}  // namespace qpu::compiler
