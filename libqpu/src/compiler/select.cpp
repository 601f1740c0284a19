// Instruction selection: translates the intermediate representation to machine operations. Masks
// are usually not materialised in registers. Instead, operations set the flags where a mask is
// needed, unless the flags already represent the mask.
//
// Phis are eliminated with copies at the end of the predecessors and at the start of the block.
// Reference: Vugranam C. Sreedhar, Roy Dz-Ching Ju, David M. Gillies and Vatsa Santhanam,
// "Translating Out of Static Single Assignment Form", 1999. A later pass coalesces these copies.
#include <algorithm>
#include <cassert>
#include <utility>

#include "compiler/coalesce.hpp"
#include "compiler/compile.hpp"
#include "compiler/immediates.hpp"
#include "compiler/ir.hpp"
#include "compiler/lower.hpp"
#include "compiler/mir_text.hpp"
#include "compiler/optimise.hpp"
#include "compiler/select_masks.hpp"

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
  explicit Selection(Graph& graph) : graph_(graph), ops_(graph), masks_(graph, ops_) {}

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
    function_.blocks.resize(graph_.blocks.size());
    countUses();
    prepareUniforms();
    preparePhis();
    for (std::uint32_t b = 0; b < graph_.blocks.size(); ++b) block(b);
    function_.sites = std::move(graph_.sites);
    function_.registers = ops_.registers();
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
    // If the only use of a result is a Select, the operation is moved to the Select and executed
    // under the Select's condition.
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

  // Arguments that the kernel does not use are not in the uniform stream.
  void prepareUniforms() {
    ops_.appendTo(function_.blocks[0].operations);
    for (Value v = 0; v < graph_.values.size(); ++v) {
      const Instruction& i = graph_.values[v];
      if (i.kind != Kind::Uniform) continue;
      const code::Uniform& u = graph_.uniforms[i.bits];
      if (u.kind == code::Uniform::Kind::Argument && uses_[v] == 0) continue;
      function_.uniforms.push_back(u);
      ops_.emit(Op::Uniform, v);
    }
  }

  // Each phi is assigned a register that all predecessors write and that a copy at the start of the
  // phi's block reads. Critical edges are split, except loop back edges, because splitting a back
  // edge would cost a jump per iteration.
  void preparePhis() {
    phiRegister_.assign(graph_.values.size(), kNone);
    for (const ir::Block& b : graph_.blocks)
      for (const Value phi : b.phis) phiRegister_[phi] = ops_.newRegister();
  }

  // --- operations ---

  static bool isOfOne(AddOp op) {
    return op == AddOp::Not || op == AddOp::ItoF || op == AddOp::FtoI;
  }

  void alu(const Instruction& i, Vreg target, Cond cond) {
    if (isOfOne(i.add)) {
      const Operand a = ops_.operand(i.a);
      ops_.emitAdd(i.add, target, a, a).cond = cond;
      return;
    }
    if (graph_.isConstant(i.b) && !graph_.isConstant(i.a)) {
      const auto [op, bits] = withConstant(i.add, graph_.values[i.b].bits);
      if (isImmediate(bits)) {
        ops_.emitAdd(op, target, ops_.operand(i.a), Operand::imm(bits)).cond = cond;
        return;
      }
    }
    const auto [a, b] = ops_.operands(i.a, i.b);
    ops_.emitAdd(i.add, target, a, b).cond = cond;
  }

  // Emits the operation that computes v into `target`.
  void compute(Value v, Vreg target, Cond cond) {
    const Instruction i = graph_.values[v];
    if (i.kind == Kind::Alu) return alu(i, target, cond);
    const auto [a, b] = ops_.operands(i.a, i.b);
    Operation& o = ops_.emit(Op::Mul, target);
    o.mul = i.mul;
    o.a = a;
    o.b = b;
    o.cond = cond;
  }

  // --- blocks ---

  void select(Value v, const Instruction& i) {
    const Cond holds = masks_.setFlagsTo(i.c);
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
      ops_.move(target, v, cond);
  }

  void instruction(Value v) {
    const Instruction i = graph_.values[v];
    ops_.site(i.site);
    switch (i.kind) {
      case Kind::Element: ops_.emit(Op::ElementNumber, v); return;
      case Kind::Literal: return ops_.load(v, i.bits);
      case Kind::Alu:
      case Kind::Mul:
        if (!fused_[v]) compute(v, v, Cond::Always);
        return;
      case Kind::Rotate: return rotate(v, i);
      case Kind::Broadcast:
      case Kind::Sfu: {
        const Operand a = ops_.inRegister(i.a);
        Operation& o = ops_.emit(i.kind == Kind::Sfu ? Op::Sfu : Op::Broadcast, v);
        o.a = a;
        o.constant = i.bits;
        return;
      }
      case Kind::Select: return select(v, i);
      case Kind::Effect: {
        const Operand a = i.a == kNone ? Operand{} : ops_.operand(i.a);
        Operation& o = ops_.emit(i.op, hasResult(i) ? v : Operation::kNone);
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
    if (graph_.isConstant(i.b) && (graph_.values[i.b].bits & 15U) == 0) return ops_.move(v, i.a);
    const Operand a = ops_.inRegister(i.a);
    Operand by = Operand::reg(i.b);
    if (graph_.isConstant(i.b)) by = Operand::imm(graph_.values[i.b].bits & 15U);
    Operation& o = ops_.emit(Op::Rotate, v);
    o.a = a;
    o.b = by;
  }

  // Copies the arguments that b's phis have for its predecessor number `pred`.
  void addPhiCopies(const ir::Block& b, std::size_t pred) {
    for (const Value phi : b.phis) ops_.move(phiRegister_[phi], graph_.arguments(phi)[pred]);
  }

  std::size_t predecessorNumber(std::uint32_t from, std::uint32_t to) const {
    const std::vector<std::uint32_t>& preds = graph_.blocks[to].preds;
    return static_cast<std::size_t>(std::find(preds.begin(), preds.end(), from) - preds.begin());
  }

  // Returns the block to which a branch from `from` to `to` leads. If the edge is split to hold phi
  // copies, the function returns the new block on the edge.
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
    ops_.appendTo(block.operations);
    addPhiCopies(b, predecessorNumber(from, to));
    ops_.appendTo(function_.blocks[from].operations);
    return between;
  }

  void block(std::uint32_t number) {
    const ir::Block& b = graph_.blocks[number];
    ops_.beginBlock(function_.blocks[number].operations);
    masks_.beginBlock();
    for (const Value phi : b.phis) {
      Operation& o = ops_.emit(Op::Move, phi);
      o.a = Operand::reg(phiRegister_[phi]);
    }
    for (const Value v : b.body) instruction(v);
    ops_.site(b.site);
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
    Cond holds = masks_.setFlagsTo(b.condition);
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
  OperationWriter ops_;
  MaskSelector masks_;
  Function function_;
  std::vector<std::uint32_t> uses_;
  std::vector<bool> fused_;
  std::vector<Vreg> phiRegister_;
};

}  // namespace

namespace {

// The number of registers that are reserved for short-lived values.
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
