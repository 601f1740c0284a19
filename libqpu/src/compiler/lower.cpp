#include "compiler/lower.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "compiler/lower_blocks.hpp"
#include "compiler/lower_conditions.hpp"
#include "compiler/lower_setup.hpp"
#include "compiler/vpm_layout.hpp"
#include "error_facts.hpp"
#include "isa/instruction.hpp"

namespace qpu::compiler {
namespace {

using detail::Source;
using detail::Statement;
using detail::StatementKind;
using ir::kNone;
using ir::Value;
using isa::AddOp;

class Lowering {
 public:
  Lowering(const Source& source, const Options& options, bool mergeStores)
      : c_(source, options, mergeStores), blocks_(c_), memory_(c_), expressions_(c_, memory_),
        conditions_(c_, blocks_, expressions_),
        summariser_(source, c_.countsGathers()) {
    const KernelFacts& facts = c_.facts;
    ir::Graph& graph = c_.graph;
    graph.name = source.name;
    graph.parameters = static_cast<std::uint32_t>(source.parameters.size());
    graph.usesVpmByHand = facts.vpmByHand;
    graph.keepsWriteWindow =
        options.keepWriteWindow && !mergeStores && c_.optimise && facts.stores && !facts.vpmByHand;
    // If gathers cannot alternate between the TMUs, gathers use one TMU and loads use the other
    // TMU.
    graph.usesTwoTmus = facts.loads || (facts.gathers && c_.gathers.usesBothTmus);
    graph.mergesStores = mergeStores;
    if (!facts.vpmByHand && !mergeStores) {
      graph.spillRow = vpm::kSpillRow;
      graph.spillRowStride = 1;
    }
  }

  ir::Graph run() {
    blocks_.place(blocks_.newBlock());
    c_.graph.qpuNumber = uniform({code::Uniform::Kind::QpuNumber, 0});
    c_.qpuCount = uniform({code::Uniform::Kind::QpuCount, 0});
    c_.environment.assign(c_.source.variables.size() + static_cast<std::size_t>(Hidden::Count),
                          c_.builder.constant(0));
    for (std::uint32_t i = 0; i < c_.source.parameters.size(); ++i)
      c_.environment[i] = uniform({code::Uniform::Kind::Argument, i});
    memory_.prepare();
    block(c_.source.body);
    finish();
    blocks_.number();
    return std::move(c_.graph);
  }

  // Returns true if the kernel has stores that could be merged.
  bool foundAdjacentStores() const { return memory_.foundAdjacent(); }

 private:
  Value uniform(code::Uniform u) {
    ir::Instruction i;
    i.kind = ir::Kind::Uniform;
    i.bits = static_cast<std::uint32_t>(c_.graph.uniforms.size());
    c_.graph.uniforms.push_back(u);
    c_.graph.values.push_back(i);
    return static_cast<Value>(c_.graph.values.size() - 1);
  }

  // --- statements ---

  void ifElse(const Statement& s) {
    const Summary summary = summariser_.summarise(s);
    const std::uint32_t yes = blocks_.newBlock();
    const std::uint32_t join = blocks_.newBlock();
    const std::uint32_t no = s.other.empty() ? join : blocks_.newBlock();
    conditions_.branch(s.value, yes, no);
    const std::size_t direct = blocks_.predecessors(join);
    const std::vector<Value> before = blocks_.valuesOf(summary.assigned);
    const MemoryState entry = memory_.state;
    if (blocks_.isReachable(yes)) branchBody(yes, s.body, join);
    const std::vector<Value> after = blocks_.valuesOf(summary.assigned);
    if (s.other.empty()) {
      blocks_.place(join);
      if (direct > 0) memory_.state.join(entry);
      blocks_.merge(summary.assigned, direct, before, after);
      return;
    }
    const std::size_t fromYes = blocks_.predecessors(join);
    const MemoryState afterYes = memory_.state;
    blocks_.restore(summary.assigned, before);
    memory_.state = entry;
    if (blocks_.isReachable(no)) branchBody(no, s.other, join);
    if (fromYes > 0) {
      if (blocks_.isReachable(no))
        memory_.state.join(afterYes);
      else
        memory_.state = afterYes;
    }
    const std::vector<Value> afterNo = blocks_.valuesOf(summary.assigned);
    blocks_.place(join);
    blocks_.merge(summary.assigned, fromYes, after, afterNo);
  }

  void branchBody(std::uint32_t b, const std::vector<Statement>& statements, std::uint32_t then) {
    blocks_.place(b);
    const std::size_t mark = c_.builder.mark();
    block(statements);
    c_.builder.forget(mark);
    blocks_.jump(then);
  }

  void loop(const Statement& s) {
    const Summary summary = summariser_.summarise(s);
    const std::uint32_t preheader = blocks_.newBlock();
    const std::uint32_t exit = blocks_.newBlock();
    conditions_.branch(s.value, preheader, exit);
    if (!blocks_.isReachable(preheader)) {
      blocks_.place(exit);
      return;
    }
    const std::size_t direct = blocks_.predecessors(exit);
    const std::vector<Value> before = blocks_.valuesOf(summary.assigned);
    blocks_.place(preheader);
    const std::uint32_t header = blocks_.newBlock();
    blocks_.jump(header);
    ir::Loop l;
    l.parent = blocks_.loop();
    l.depth = l.parent == kNone ? 1 : c_.graph.loops[l.parent].depth + 1;
    l.preheader = preheader;
    l.header = header;
    const std::uint32_t outer = blocks_.beginLoop(l);
    blocks_.place(header);
    std::vector<Value> phis;
    phis.reserve(summary.assigned.size());
    for (const std::uint32_t v : summary.assigned) {
      phis.push_back(c_.builder.phi(header));
      c_.environment[v] = phis.back();
    }
    const MemoryState entry = memory_.state;
    memory_.state.enterLoop(summary);
    const std::size_t mark = c_.builder.mark();
    block(s.body);
    block(s.other);
    beginStatement(s);
    conditions_.branch(s.value, header, exit, true);
    c_.builder.forget(mark);
    const std::vector<Value> after = blocks_.valuesOf(summary.assigned);
    for (std::size_t i = 0; i < phis.size(); ++i) {
      std::vector<Value>& arguments = c_.graph.arguments(phis[i]);
      arguments.assign(blocks_.predecessors(header), after[i]);
      arguments[0] = before[i];
    }
    c_.graph.loops[blocks_.loop()].last = blocks_.lastPlaced();
    blocks_.endLoop(outer);
    blocks_.place(exit);
    blocks_.merge(summary.assigned, direct, before, after);
    if (direct > 0) memory_.state.join(entry);
  }

  void where(const Statement& s) {
    const Value outer = mask_;
    const Value condition = expressions_.evaluate(s.value);
    mask_ = outer == kNone ? condition : c_.builder.maskAnd(condition, outer);
    block(s.body);
    if (!s.other.empty()) {
      const Value inverse = c_.builder.maskNot(condition);
      mask_ = outer == kNone ? inverse : c_.builder.maskAnd(inverse, outer);
      block(s.other);
    }
    mask_ = outer;
  }

  void set(std::uint32_t variable, Value v) {
    c_.environment[variable] =
        mask_ == kNone ? v : c_.builder.select(mask_, v, c_.environment[variable]);
  }

  void block(const std::vector<Statement>& statements) {
    for (const Statement& s : statements) {
      beginStatement(s);
      statement(s);
    }
    memory_.flushStores();
  }

  void beginStatement(const Statement& s) {
    expressions_.beginStatement(s);
    c_.site = static_cast<std::uint32_t>(c_.graph.sites.size());
    c_.graph.sites.push_back({s.site.construct, c_.source.describe(s.site)});
    c_.builder.site(c_.site);
  }

  void statement(const Statement& s) {
    // Assign and Receive access memory only if an expression contains a load.
    if (s.kind != StatementKind::Assign && s.kind != StatementKind::Receive &&
        s.kind != StatementKind::Store)
      memory_.flushStores();
    switch (s.kind) {
      case StatementKind::Assign: set(s.target, expressions_.evaluate(s.value)); return;
      case StatementKind::Store: return store(s);
      case StatementKind::Gather:
        if (memory_.state.pending == MemoryState::Pending::StoreToWaitFor) memory_.waitForStore();
        c_.builder.effect(Op::TmuRequest, expressions_.evaluate(s.address), 0, unitOf(s));
        countGathers(1);
        return;
      case StatementKind::Receive:
        set(s.target, c_.builder.effect(Op::TmuReceive, kNone, 0, unitOf(s)));
        countGathers(UINT32_MAX);
        return;
      case StatementKind::If: return ifElse(s);
      case StatementKind::While:
      case StatementKind::For: return loop(s);
      case StatementKind::Where: return where(s);
      case StatementKind::PrintText: return;
      case StatementKind::PrintVector:
        // A QPU cannot print, but the compiled code must still perform the expression's VPM reads.
        if (c_.source.expressions[s.value].vpmReads > 0) (void)expressions_.evaluate(s.value);
        return;
      case StatementKind::SemaphoreRelease:
        memory_.waitForStore();
        c_.builder.effect(Op::SemaphoreRelease, kNone, static_cast<std::uint32_t>(s.count));
        return;
      case StatementKind::SemaphoreAcquire:
        c_.builder.effect(Op::SemaphoreAcquire, kNone, static_cast<std::uint32_t>(s.count));
        memory_.state.acquired = true;
        return;
      case StatementKind::DmaReadPitch:
        c_.builder.effect(Op::VpmReadSetup, memory_.with(setup::kDmaReadPitch, expressions_.evaluate(s.value)));
        return;
      case StatementKind::DmaReadSetup:
        memory_.setUp(Op::VpmReadSetup, Hidden::HandLoadSetup,
                      memory_.with(setup::dmaRead(s), expressions_.evaluate(s.address)));
        return;
      case StatementKind::DmaReadStart:
        memory_.waitForStore();
        c_.builder.effect(Op::DmaLoadStart, expressions_.evaluate(s.address));
        return;
      case StatementKind::DmaReadWait: c_.builder.effect(Op::DmaLoadWait); return;
      case StatementKind::DmaWriteStride:
        memory_.waitForStore();
        c_.builder.effect(Op::VpmWriteSetup, memory_.with(setup::kDmaWriteStride, expressions_.evaluate(s.value)));
        return;
      case StatementKind::DmaWriteSetup:
        memory_.waitForStore();
        memory_.setUp(Op::VpmWriteSetup, Hidden::HandStoreSetup,
                      memory_.with(setup::dmaWrite(s), c_.builder.alu(AddOp::Shl, expressions_.evaluate(s.address),
                                                                      c_.builder.constant(3))));
        return;
      case StatementKind::DmaWriteStart:
        memory_.waitForStore();
        c_.builder.effect(Op::DmaStoreStart, expressions_.evaluate(s.address));
        memory_.state.stored = true;
        memory_.state.pending = MemoryState::Pending::Store;
        return;
      case StatementKind::DmaWriteWait:
        c_.builder.effect(Op::DmaStoreWait);
        memory_.state.pending = MemoryState::Pending::None;
        return;
      case StatementKind::VpmReadSetup:
        c_.builder.effect(Op::VpmReadSetup, memory_.with(setup::vpmRead(s), expressions_.evaluate(s.address)));
        return;
      case StatementKind::VpmWriteSetup:
        memory_.setUp(Op::VpmWriteSetup, Hidden::HandWriteWindow,
                      memory_.with(setup::vpmWrite(s), expressions_.evaluate(s.address)));
        return;
      case StatementKind::VpmWrite:
        c_.builder.effect(Op::VpmWrite, expressions_.evaluate(s.value));
        if (c_.facts.stores) memory_.advanceWindow();
        return;
    }
  }

  void store(const Statement& s) {
    const Value value = expressions_.evaluate(s.value);
    const Value address = expressions_.evaluate(s.address);
    const Value limit = s.limit == detail::kNoExpression ? kNone : expressions_.evaluate(s.limit);
    memory_.store(s, value, address, limit);
  }

  std::uint8_t unitOf(const Statement& s) const {
    return c_.gathers.usesBothTmus ? c_.gathers.units[s.site.number] : std::uint8_t{0};
  }

  void countGathers(std::uint32_t by) {
    if (!c_.countsGathers()) return;
    Value& outstanding = c_.hidden(Hidden::Outstanding);
    outstanding = c_.builder.alu(AddOp::Add, outstanding, c_.builder.constant(by));
  }

  // Waits until the last store has reached memory, all gathers have been received and all QPUs
  // have finished. QPU 0 then interrupts the host.
  void finish() {
    c_.site = code::Object::kNoSite;
    c_.builder.site(c_.site);
    memory_.waitForStore();
    for (const std::uint8_t unit : c_.gathers.left) c_.builder.effect(Op::TmuReceive, kNone, 0, unit);
    if (c_.countsGathers()) receiveAll();
    const std::uint32_t semaphore = freeSemaphore();
    const std::uint32_t worker = blocks_.newBlock();
    const std::uint32_t master = blocks_.newBlock();
    const std::uint32_t interrupt = blocks_.newBlock();
    const std::uint32_t end = blocks_.newBlock();
    const Value zero = c_.builder.constant(0);
    blocks_.branch(c_.builder.compare(ir::Test::Equal, c_.graph.qpuNumber, zero), false, master, worker);
    blocks_.place(worker);
    c_.builder.effect(Op::SemaphoreRelease, kNone, semaphore);
    blocks_.jump(end);
    blocks_.place(master);
    repeat(c_.builder.alu(AddOp::Add, c_.qpuCount, c_.builder.constant(UINT32_MAX)), interrupt,
           [&] { c_.builder.effect(Op::SemaphoreAcquire, kNone, semaphore); });
    blocks_.place(interrupt);
    c_.builder.effect(Op::HostInterrupt);
    blocks_.jump(end);
    blocks_.place(end);
  }

  void receiveAll() {
    const std::uint32_t done = blocks_.newBlock();
    repeat(c_.hidden(Hidden::Outstanding), done,
           [&] { c_.builder.effect(Op::TmuReceive, kNone, 0, 0); });
    blocks_.place(done);
  }

  // Builds a loop with `times` iterations (0 is allowed), whose body f() generates. The loop exits
  // to block `then`.
  template <typename F>
  void repeat(Value times, std::uint32_t then, F f) {
    const Value zero = c_.builder.constant(0);
    const std::uint32_t preheader = blocks_.newBlock();
    const std::uint32_t again = blocks_.newBlock();
    blocks_.branch(c_.builder.compare(ir::Test::Equal, times, zero), false, then, preheader);
    blocks_.place(preheader);
    blocks_.jump(again);
    ir::Loop l;
    l.preheader = preheader;
    l.header = l.last = again;
    const std::uint32_t outer = blocks_.beginLoop(l);
    blocks_.place(again);
    const Value left = c_.builder.phi(again);
    f();
    const Value less = c_.builder.alu(AddOp::Add, left, c_.builder.constant(UINT32_MAX));
    blocks_.branch(c_.builder.compare(ir::Test::Equal, less, zero), false, then, again);
    c_.graph.arguments(left) = {times, less};
    blocks_.endLoop(outer);
  }

  std::uint32_t freeSemaphore() const {
    for (std::size_t s = kSemaphores; s-- > 0;)
      if (!c_.facts.semaphores.test(s)) return static_cast<std::uint32_t>(s);
    detail::raise<CompileError>(
        "kernel '" + c_.source.name +
            "': the kernel uses all 16 semaphores, but QPU 0 needs one to wait for the other QPUs "
            "at the end of the kernel. Leave one semaphore free",
        {c_.source.name, "semaphore", -1, 0});
  }

  LowerContext c_;
  BlockBuilder blocks_;
  MemoryLowering memory_;
  ExpressionLowering expressions_;
  ConditionLowering conditions_;
  Summariser summariser_;
  Value mask_ = kNone;  // the combined mask of the enclosing Where statements
};

}  // namespace

ir::Graph lower(const Source& source, const Options& options) {
  Lowering lowering(source, options, false);
  ir::Graph graph = lowering.run();
  if (!options.mergeStores || !lowering.foundAdjacentStores()) return graph;
  return Lowering(source, options, true).run();
}

}  // namespace qpu::compiler
