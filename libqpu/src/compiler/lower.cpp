#include "compiler/lower.hpp"

#include <algorithm>
#include <bitset>
#include <map>
#include <utility>
#include <vector>

#include "compiler/lower_vpm.hpp"
#include "compiler/maker.hpp"
#include "compiler/vpm_layout.hpp"
#include "error_facts.hpp"
#include "isa/instruction.hpp"
#include "lang/gathers.hpp"

namespace qpu::compiler {
namespace {

using detail::Direction;
using detail::Expression;
using detail::Source;
using detail::Statement;
using detail::StatementKind;
using ir::kNone;
using ir::Value;
using isa::AddOp;
using isa::MulOp;
using SourceOp = detail::Op;

constexpr std::size_t kSemaphores = 16;

// What the statements of a block, and those within them, do.
struct Summary {
  std::vector<std::uint32_t> assigned;  // variables
  bool stores = false;
  bool waitsForStore = false;
  bool acquires = false;
};

// Sum of values, each so many times, and a constant; all modulo 2^32.
struct Sum {
  std::map<Value, std::uint32_t> times;
  std::uint32_t constant = 0;

  void add(Value v, std::uint32_t factor) {
    std::uint32_t& n = times[v];
    n += factor;
    if (n == 0) times.erase(v);
  }
  bool operator==(const Sum& o) const { return constant == o.constant && times == o.times; }
};

// What is known of the kernel as a whole.
struct Facts {
  std::bitset<kSemaphores> semaphores;
  bool stores = false;
  bool gathers = false;
  bool loads = false;
  bool vpmByHand = false;
};

class Lowering {
 public:
  Lowering(const Source& source, const Options& options, bool merge)
      : source_(source),
        optimise_(options.level > 0),
        keepWriteWindow_(options.keepWriteWindow && !merge),
        merge_(merge),
        gathers_(detail::planGathers(source)),
        maker_(graph_, optimise_) {
    computedIn_.resize(source.expressions.size(), 0);
    valueOf_.resize(source.expressions.size(), kNone);
    assignedIn_.resize(source.variables.size() + kHidden, 0);
  }

  ir::Graph run() {
    graph_.name = source_.name;
    graph_.parameters = static_cast<std::uint32_t>(source_.parameters.size());
    std::vector<char> used(source_.expressions.size() + 1, 0);
    gatherFacts(source_.body, used);
    facts_.loads = anyLoad(used);
    graph_.usesVpmByHand = facts_.vpmByHand;
    if (facts_.vpmByHand) byHand_ = followVpm(source_);
    graph_.keepsWriteWindow =
        keepWriteWindow_ && optimise_ && facts_.stores && !facts_.vpmByHand;
    // A kernel whose gathers cannot alternate gives them one TMU, loads the other.
    graph_.usesTwoTmus = facts_.loads || (facts_.gathers && gathers_.usesBothTmus);
    graph_.mergesStores = merge_;
    if (!facts_.vpmByHand && !merge_) {
      graph_.spillRow = vpm::kSpillRow;
      graph_.spillRowStride = 1;
    }
    place(newBlock());
    graph_.qpuNumber = uniform({code::Uniform::Kind::QpuNumber, 0});
    count_ = uniform({code::Uniform::Kind::QpuCount, 0});
    environment_.assign(source_.variables.size() + kHidden, maker_.constant(0));
    for (std::uint32_t i = 0; i < source_.parameters.size(); ++i)
      environment_[i] = uniform({code::Uniform::Kind::Argument, i});
    prepareVpm();
    block(source_.body);
    finish();
    number();
    return std::move(graph_);
  }

  // Whether stores follow each other that are to neighbouring places.
  bool foundNeighbours() const { return foundNeighbours_; }

 private:
  // Variables of the compiler's own, after those of the source.
  enum Hidden : std::uint32_t {
    StoreSetup,       // of the next store
    WriteWindow,      // of the next store, unless it is kept
    Outstanding,      // gathers, where no analysis tells
    HandWriteWindow,  // set-ups of the source, as they are now
    HandStoreSetup,
    HandLoadSetup,
    kHidden
  };
  enum class Pending : std::uint8_t { None, Store, StoreToWaitFor };

  std::uint32_t hidden(Hidden h) const {
    return static_cast<std::uint32_t>(source_.variables.size()) + h;
  }

  [[noreturn]] void fail(const Statement& s, const std::string& what) const {
    detail::raise<CompileError>(
        "kernel '" + source_.name + "': " + source_.describe(s.site) + ": " + what,
        {source_.name, s.site.construct, -1, 0});
  }

  // --- facts ---

  // And notes the expressions that statements use.
  void gatherFacts(const std::vector<Statement>& statements, std::vector<char>& used) {
    const auto use = [&used](std::uint32_t expression) {
      if (expression != detail::kNoExpression) used[expression] = 1;
    };
    for (const Statement& s : statements) {
      use(s.value);
      use(s.address);
      use(s.limit);
      switch (s.kind) {
        case StatementKind::Store: facts_.stores = true; break;
        case StatementKind::Gather: facts_.gathers = true; break;
        case StatementKind::SemaphoreAcquire:
        case StatementKind::SemaphoreRelease:
          facts_.semaphores.set(static_cast<std::size_t>(s.count));
          break;
        case StatementKind::DmaWriteStart:
          facts_.stores = facts_.vpmByHand = true;
          break;
        case StatementKind::DmaReadPitch:
        case StatementKind::DmaReadSetup:
        case StatementKind::DmaReadStart:
        case StatementKind::DmaReadWait:
        case StatementKind::DmaWriteStride:
        case StatementKind::DmaWriteSetup:
        case StatementKind::DmaWriteWait:
        case StatementKind::VpmReadSetup:
        case StatementKind::VpmWriteSetup:
        case StatementKind::VpmWrite: facts_.vpmByHand = true; break;
        default: break;
      }
      gatherFacts(s.body, used);
      gatherFacts(s.other, used);
    }
  }

  // `*p = x` has recorded `*p` as a load, which nothing uses.
  bool anyLoad(std::vector<char>& used) const {
    for (std::size_t i = source_.expressions.size(); i-- > 0;) {
      if (used[i] == 0) continue;
      const Expression& e = source_.expressions[i];
      if (e.op == SourceOp::Load) return true;
      used[e.a] = used[e.b] = 1;  // of leaves these are 0, which is a leaf
    }
    return false;
  }

  void assigns(Summary& summary, std::uint32_t variable) {
    if (assignedIn_[variable] == summaries_) return;
    assignedIn_[variable] = summaries_;
    summary.assigned.push_back(variable);
  }

  void summarise(const std::vector<Statement>& statements, Summary& summary) {
    for (const Statement& s : statements) {
      switch (s.kind) {
        case StatementKind::Assign: assigns(summary, s.target); break;
        case StatementKind::Receive:
          assigns(summary, s.target);
          if (counting()) assigns(summary, hidden(Outstanding));
          break;
        case StatementKind::Gather:
          if (counting()) assigns(summary, hidden(Outstanding));
          break;
        case StatementKind::VpmWrite:
        case StatementKind::VpmWriteSetup: assigns(summary, hidden(HandWriteWindow)); break;
        case StatementKind::DmaWriteSetup: assigns(summary, hidden(HandStoreSetup)); break;
        case StatementKind::DmaReadSetup: assigns(summary, hidden(HandLoadSetup)); break;
        case StatementKind::Store:
          summary.stores = true;
          summary.waitsForStore = summary.waitsForStore || s.wait;
          assigns(summary, hidden(StoreSetup));
          assigns(summary, hidden(WriteWindow));
          break;
        case StatementKind::DmaWriteStart: summary.stores = true; break;
        case StatementKind::SemaphoreAcquire: summary.acquires = true; break;
        default: break;
      }
      summarise(s.body, summary);
      summarise(s.other, summary);
    }
  }

  Summary summaryOf(const Statement& s) {
    ++summaries_;
    Summary summary;
    summarise(s.body, summary);
    summarise(s.other, summary);
    return summary;
  }

  // --- blocks ---

  std::uint32_t newBlock() {
    graph_.blocks.emplace_back();
    return static_cast<std::uint32_t>(graph_.blocks.size() - 1);
  }

  void place(std::uint32_t b) {
    order_.push_back(b);
    graph_.blocks[b].loop = loop_;
    maker_.at(b);
  }

  bool reached(std::uint32_t b) const { return !graph_.blocks[b].preds.empty(); }

  void jump(std::uint32_t to) {
    ir::Block& b = graph_.blocks[maker_.block()];
    b.exit = ir::Block::Exit::Jump;
    b.next = to;
    graph_.blocks[to].preds.push_back(maker_.block());
  }

  void branch(Value mask, bool all, std::uint32_t yes, std::uint32_t no) {
    ir::Block& b = graph_.blocks[maker_.block()];
    b.exit = ir::Block::Exit::Branch;
    b.condition = mask;
    b.all = all;
    b.taken = yes;
    b.next = no;
    b.site = site_;
    graph_.blocks[yes].preds.push_back(maker_.block());
    graph_.blocks[no].preds.push_back(maker_.block());
  }

  // The merged value of a variable at the start of the current block: first[i]
  // from its first `count` ways in, second[i] from the others.
  void merge(const std::vector<std::uint32_t>& variables, std::size_t count,
             const std::vector<Value>& first, const std::vector<Value>& second) {
    const std::uint32_t b = maker_.block();
    const std::size_t ways = graph_.blocks[b].preds.size();
    for (std::size_t i = 0; i < variables.size(); ++i) {
      Value& v = environment_[variables[i]];
      if (count == 0 || count == ways || first[i] == second[i]) {
        v = count == 0 ? second[i] : first[i];
        continue;
      }
      v = maker_.phi(b);
      std::vector<Value>& arguments = graph_.arguments(v);
      arguments.assign(ways, second[i]);
      std::fill_n(arguments.begin(), count, first[i]);
    }
  }

  std::vector<Value> valuesOf(const std::vector<std::uint32_t>& variables) const {
    std::vector<Value> values(variables.size());
    for (std::size_t i = 0; i < variables.size(); ++i) values[i] = environment_[variables[i]];
    return values;
  }

  void restore(const std::vector<std::uint32_t>& variables, const std::vector<Value>& values) {
    for (std::size_t i = 0; i < variables.size(); ++i) environment_[variables[i]] = values[i];
  }

  // Blocks in the order of placing, so that numbers tell what comes first.
  void number() {
    std::vector<std::uint32_t> to(graph_.blocks.size(), kNone);
    for (std::uint32_t i = 0; i < order_.size(); ++i) to[order_[i]] = i;
    std::vector<ir::Block> blocks;
    blocks.reserve(order_.size());
    const auto renumber = [&to](std::uint32_t& b) {
      if (b != kNone) b = to[b];
    };
    for (const std::uint32_t b : order_) blocks.push_back(std::move(graph_.blocks[b]));
    for (ir::Block& b : blocks) {
      renumber(b.taken);
      renumber(b.next);
      for (std::uint32_t& p : b.preds) renumber(p);
    }
    graph_.blocks = std::move(blocks);
    for (ir::Instruction& i : graph_.values) renumber(i.block);
    for (ir::Loop& l : graph_.loops) {
      renumber(l.preheader);
      renumber(l.header);
      renumber(l.last);
    }
  }

  // --- expressions ---

  Value uniform(code::Uniform u) {
    ir::Instruction i;
    i.kind = ir::Kind::Uniform;
    i.bits = static_cast<std::uint32_t>(graph_.uniforms.size());
    graph_.uniforms.push_back(u);
    graph_.values.push_back(i);
    return static_cast<Value>(graph_.values.size() - 1);
  }

  Value evaluate(std::uint32_t id) {
    const Expression& e = source_.expressions[id];
    switch (e.op) {
      case SourceOp::Constant: return maker_.constant(e.bits);
      case SourceOp::Variable: return environment_[e.bits];
      case SourceOp::ElementNumber: return maker_.element();
      case SourceOp::QpuNumber: return graph_.qpuNumber;
      case SourceOp::QpuCount: return count_;
      default: break;
    }
    if (!e.readsVpm && computedIn_[id] == statement_) return valueOf_[id];
    const Value v = compute(e);
    computedIn_[id] = statement_;
    valueOf_[id] = v;
    return v;
  }

  Value alu(AddOp op, const Expression& e) {
    const Value a = evaluate(e.a);
    return maker_.alu(op, a, evaluate(e.b));
  }
  Value aluOfOne(AddOp op, const Expression& e) { return maker_.alu(op, evaluate(e.a)); }
  Value mul(MulOp op, const Expression& e) {
    const Value a = evaluate(e.a);
    return maker_.mul(op, a, evaluate(e.b));
  }
  // `swap`: the test is of b and a.
  Value compare(ir::Test test, const Expression& e, bool swap, bool negate) {
    const Value a = evaluate(e.a);
    const Value b = evaluate(e.b);
    const Value mask = swap ? maker_.compare(test, b, a) : maker_.compare(test, a, b);
    return negate ? maker_.maskNot(mask) : mask;
  }

  Value differ(const Expression& e) {
    const Value less = compare(ir::Test::FloatLess, e, false, false);
    return maker_.maskOr(less, compare(ir::Test::FloatLess, e, true, false));
  }

  Value compute(const Expression& e) {
    using ir::Test;
    switch (e.op) {
      case SourceOp::Add: return alu(AddOp::Add, e);
      case SourceOp::Sub: return alu(AddOp::Sub, e);
      case SourceOp::Mul24: return mul(MulOp::Mul24, e);
      case SourceOp::Min: return alu(AddOp::Min, e);
      case SourceOp::Max: return alu(AddOp::Max, e);
      case SourceOp::Shl: return alu(AddOp::Shl, e);
      case SourceOp::Asr: return alu(AddOp::Asr, e);
      case SourceOp::Shr: return alu(AddOp::Shr, e);
      case SourceOp::Ror: return alu(AddOp::Ror, e);
      case SourceOp::And: return alu(AddOp::And, e);
      case SourceOp::Or: return alu(AddOp::Or, e);
      case SourceOp::Xor: return alu(AddOp::Xor, e);
      case SourceOp::Not: return aluOfOne(AddOp::Not, e);
      case SourceOp::FAdd: return alu(AddOp::FAdd, e);
      case SourceOp::FSub: return alu(AddOp::FSub, e);
      case SourceOp::FMul: return mul(MulOp::FMul, e);
      case SourceOp::FMin: return alu(AddOp::FMin, e);
      case SourceOp::FMax: return alu(AddOp::FMax, e);
      case SourceOp::FMaxAbs: return alu(AddOp::FMaxAbs, e);
      case SourceOp::ItoF: return aluOfOne(AddOp::ItoF, e);
      case SourceOp::FtoI: return aluOfOne(AddOp::FtoI, e);
      case SourceOp::Recip: return maker_.sfu(isa::address::kSfuRecip, evaluate(e.a));
      case SourceOp::RecipSqrt: return maker_.sfu(isa::address::kSfuRecipSqrt, evaluate(e.a));
      case SourceOp::Exp2: return maker_.sfu(isa::address::kSfuExp, evaluate(e.a));
      case SourceOp::Log2: return maker_.sfu(isa::address::kSfuLog, evaluate(e.a));
      case SourceOp::Rotate: {
        const Value a = evaluate(e.a);
        return maker_.rotate(a, evaluate(e.b));
      }
      case SourceOp::Broadcast:
        return maker_.broadcast(evaluate(e.a), source_.expressions[e.b].bits & 15U);
      case SourceOp::Load: return load(e);
      case SourceOp::VpmRead: return maker_.effect(Op::VpmRead);
      case SourceOp::Eq: return compare(Test::Equal, e, false, false);
      case SourceOp::Ne: return compare(Test::Equal, e, false, true);
      case SourceOp::Lt: return compare(Test::Less, e, false, false);
      case SourceOp::Ge: return compare(Test::Less, e, false, true);
      case SourceOp::Gt: return compare(Test::Less, e, true, false);
      case SourceOp::Le: return compare(Test::Less, e, true, true);
      case SourceOp::FEq: return maker_.maskNot(differ(e));
      case SourceOp::FNe: return differ(e);
      case SourceOp::FLt: return compare(Test::FloatLess, e, false, false);
      case SourceOp::FGe: return compare(Test::FloatLess, e, false, true);
      case SourceOp::FGt: return compare(Test::FloatLess, e, true, false);
      case SourceOp::FLe: return compare(Test::FloatLess, e, true, true);
      case SourceOp::MaskAnd: {
        const Value a = evaluate(e.a);
        return maker_.maskAnd(a, evaluate(e.b));
      }
      case SourceOp::MaskOr: {
        const Value a = evaluate(e.a);
        return maker_.maskOr(a, evaluate(e.b));
      }
      case SourceOp::MaskNot: return maker_.maskNot(evaluate(e.a));
      // Leaves are evaluate()'s, scalars branchOn()'s.
      case SourceOp::Constant:
      case SourceOp::Variable:
      case SourceOp::ElementNumber:
      case SourceOp::QpuNumber:
      case SourceOp::QpuCount:
      case SourceOp::Any:
      case SourceOp::All: break;
    }
    return maker_.constant(0);
  }

  // --- conditions ---

  bool isScalar(std::uint32_t id) const {
    return source_.expressions[id].type == detail::Type::Scalar;
  }

  // The masks under a scalar condition, all computed before the first branch.
  void evaluateMasks(std::uint32_t id, std::vector<Value>& masks) {
    const Expression& e = source_.expressions[id];
    if (e.op == SourceOp::Any || e.op == SourceOp::All) {
      masks.push_back(evaluate(e.a));
      return;
    }
    evaluateMasks(e.a, masks);
    if (e.op != SourceOp::MaskNot) evaluateMasks(e.b, masks);
  }

  void branchOn(std::uint32_t id, std::vector<Value>::const_iterator& mask, std::uint32_t yes,
                std::uint32_t no) {
    const Expression& e = source_.expressions[id];
    switch (e.op) {
      case SourceOp::MaskNot: return branchOn(e.a, mask, no, yes);
      case SourceOp::MaskAnd:
      case SourceOp::MaskOr: {
        const std::uint32_t second = newBlock();
        if (e.op == SourceOp::MaskAnd)
          branchOn(e.a, mask, second, no);
        else
          branchOn(e.a, mask, yes, second);
        if (!reached(second)) {
          skip(e.b, mask);
          return;
        }
        place(second);
        return branchOn(e.b, mask, yes, no);
      }
      default: {
        const Value m = *mask++;
        if (optimise_ && graph_.isConstant(m) && !closing_) {
          jump(graph_.values[m].bits != 0 ? yes : no);
          return;
        }
        branch(m, e.op == SourceOp::All, yes, no);
        return;
      }
    }
  }

  void skip(std::uint32_t id, std::vector<Value>::const_iterator& mask) const {
    const Expression& e = source_.expressions[id];
    if (e.op == SourceOp::Any || e.op == SourceOp::All) {
      ++mask;
      return;
    }
    skip(e.a, mask);
    if (e.op != SourceOp::MaskNot) skip(e.b, mask);
  }

  // Ends the current block.
  void decide(std::uint32_t condition, std::uint32_t yes, std::uint32_t no) {
    std::vector<Value> masks;
    evaluateMasks(condition, masks);
    auto next = masks.cbegin();
    branchOn(condition, next, yes, no);
  }

  // --- statements ---

  void conditional(const Statement& s) {
    const Summary summary = summaryOf(s);
    const std::uint32_t yes = newBlock();
    const std::uint32_t join = newBlock();
    const std::uint32_t no = s.other.empty() ? join : newBlock();
    decide(s.value, yes, no);
    const std::size_t direct = graph_.blocks[join].preds.size();
    const std::vector<Value> before = valuesOf(summary.assigned);
    const State entry = state_;
    if (reached(yes)) part(yes, s.body, join);
    const std::vector<Value> after = valuesOf(summary.assigned);
    if (s.other.empty()) {
      place(join);
      if (direct > 0) state_.join(entry);
      merge(summary.assigned, direct, before, after);
      return;
    }
    const std::size_t ways = graph_.blocks[join].preds.size();
    const State afterYes = state_;
    restore(summary.assigned, before);
    state_ = entry;
    if (reached(no)) part(no, s.other, join);
    if (ways > 0) {
      if (reached(no))
        state_.join(afterYes);
      else
        state_ = afterYes;
    }
    const std::vector<Value> afterNo = valuesOf(summary.assigned);
    place(join);
    merge(summary.assigned, ways, after, afterNo);
  }

  void part(std::uint32_t b, const std::vector<Statement>& statements, std::uint32_t then) {
    place(b);
    const std::size_t mark = maker_.mark();
    block(statements);
    maker_.forget(mark);
    jump(then);
  }

  void loop(const Statement& s) {
    const Summary summary = summaryOf(s);
    const std::uint32_t preheader = newBlock();
    const std::uint32_t exit = newBlock();
    const std::uint32_t outer = loop_;
    decide(s.value, preheader, exit);
    if (!reached(preheader)) {
      place(exit);
      return;
    }
    const std::size_t direct = graph_.blocks[exit].preds.size();
    const std::vector<Value> before = valuesOf(summary.assigned);
    place(preheader);
    const std::uint32_t header = newBlock();
    jump(header);
    loop_ = static_cast<std::uint32_t>(graph_.loops.size());
    ir::Loop l;
    l.parent = outer;
    l.depth = outer == kNone ? 1 : graph_.loops[outer].depth + 1;
    l.preheader = preheader;
    l.header = header;
    graph_.loops.push_back(l);
    place(header);
    std::vector<Value> phis;
    phis.reserve(summary.assigned.size());
    for (const std::uint32_t v : summary.assigned) {
      phis.push_back(maker_.phi(header));
      environment_[v] = phis.back();
    }
    const State entry = state_;
    state_.enterLoop(summary.stores, summary.waitsForStore, summary.acquires);
    const std::size_t mark = maker_.mark();
    block(s.body);
    block(s.other);
    beginStatement(s);
    closing_ = true;
    decide(s.value, header, exit);
    closing_ = false;
    maker_.forget(mark);
    const std::vector<Value> after = valuesOf(summary.assigned);
    for (std::size_t i = 0; i < phis.size(); ++i) {
      std::vector<Value>& arguments = graph_.arguments(phis[i]);
      arguments.assign(graph_.blocks[header].preds.size(), after[i]);
      arguments[0] = before[i];
    }
    graph_.loops[loop_].last = order_.back();
    loop_ = outer;
    place(exit);
    merge(summary.assigned, direct, before, after);
    if (direct > 0) state_.join(entry);
  }

  void where(const Statement& s) {
    const Value outer = mask_;
    const Value condition = evaluate(s.value);
    mask_ = outer == kNone ? condition : maker_.maskAnd(condition, outer);
    block(s.body);
    if (!s.other.empty()) {
      const Value inverse = maker_.maskNot(condition);
      mask_ = outer == kNone ? inverse : maker_.maskAnd(inverse, outer);
      block(s.other);
    }
    mask_ = outer;
  }

  void set(std::uint32_t variable, Value v) {
    environment_[variable] =
        mask_ == kNone ? v : maker_.select(mask_, v, environment_[variable]);
  }

  void block(const std::vector<Statement>& statements) {
    for (const Statement& s : statements) {
      beginStatement(s);
      statement(s);
    }
    endStores();
  }

  void beginStatement(const Statement& s) {
    at_ = &s;
    ++statement_;
    site_ = static_cast<std::uint32_t>(graph_.sites.size());
    graph_.sites.push_back({s.site.construct, source_.describe(s.site)});
    maker_.site(site_);
  }

  void statement(const Statement& s) {
    // These two touch no memory, unless they load; what was requested is on its way.
    if (s.kind != StatementKind::Assign && s.kind != StatementKind::Receive &&
        s.kind != StatementKind::Store)
      endStores();
    switch (s.kind) {
      case StatementKind::Assign: set(s.target, evaluate(s.value)); return;
      case StatementKind::Store: return store(s);
      case StatementKind::Gather:
        if (state_.pending == Pending::StoreToWaitFor) waitForStore();
        maker_.effect(Op::TmuRequest, evaluate(s.address), 0, unitOf(s));
        count(1);
        return;
      case StatementKind::Receive:
        set(s.target, maker_.effect(Op::TmuReceive, kNone, 0, unitOf(s)));
        count(UINT32_MAX);
        return;
      case StatementKind::If: return conditional(s);
      case StatementKind::While:
      case StatementKind::For: return loop(s);
      case StatementKind::Where: return where(s);
      case StatementKind::PrintText: return;
      case StatementKind::PrintVector:
        // Nothing to print on, but what it takes from the VPM is gone.
        if (source_.expressions[s.value].readsVpm) (void)evaluate(s.value);
        return;
      case StatementKind::SemaphoreRelease:
        waitForStore();
        maker_.effect(Op::SemaphoreRelease, kNone, static_cast<std::uint32_t>(s.count));
        return;
      case StatementKind::SemaphoreAcquire:
        maker_.effect(Op::SemaphoreAcquire, kNone, static_cast<std::uint32_t>(s.count));
        state_.acquired = true;
        return;
      case StatementKind::DmaReadPitch:
        maker_.effect(Op::VpmReadSetup, with(0x90000000U, evaluate(s.value)));
        return;
      case StatementKind::DmaReadSetup:
        setUp(Op::VpmReadSetup, HandLoadSetup, with(dmaReadWord(s), evaluate(s.address)));
        return;
      case StatementKind::DmaReadStart:
        waitForStore();
        maker_.effect(Op::DmaLoadStart, evaluate(s.address));
        return;
      case StatementKind::DmaReadWait: maker_.effect(Op::DmaLoadWait); return;
      case StatementKind::DmaWriteStride:
        waitForStore();
        maker_.effect(Op::VpmWriteSetup, with(0xc0000000U, evaluate(s.value)));
        return;
      case StatementKind::DmaWriteSetup:
        waitForStore();
        setUp(Op::VpmWriteSetup, HandStoreSetup,
              with(dmaWriteWord(s),
                   maker_.alu(AddOp::Shl, evaluate(s.address), maker_.constant(3))));
        return;
      case StatementKind::DmaWriteStart:
        waitForStore();
        maker_.effect(Op::DmaStoreStart, evaluate(s.address));
        state_.stored = true;
        state_.pending = Pending::Store;
        return;
      case StatementKind::DmaWriteWait:
        maker_.effect(Op::DmaStoreWait);
        state_.pending = Pending::None;
        return;
      case StatementKind::VpmReadSetup:
        maker_.effect(Op::VpmReadSetup, with(vpmReadWord(s), evaluate(s.address)));
        return;
      case StatementKind::VpmWriteSetup:
        setUp(Op::VpmWriteSetup, HandWriteWindow, with(vpmWriteWord(s), evaluate(s.address)));
        return;
      case StatementKind::VpmWrite:
        maker_.effect(Op::VpmWrite, evaluate(s.value));
        if (facts_.stores) advanceWindow();
        return;
    }
  }

  // --- memory ---

  std::uint8_t unitOf(const Statement& s) const {
    return gathers_.usesBothTmus ? gathers_.units[s.site.number] : std::uint8_t{0};
  }

  // Fields that are known and one that may not be.
  Value with(std::uint32_t word, Value field) {
    return maker_.alu(AddOp::Or, field, maker_.constant(word));
  }

  static std::uint32_t horizontal(const Statement& s, unsigned bit) {
    return s.direction == Direction::Horizontal ? 1U << bit : 0;
  }
  static std::uint32_t field(int value, unsigned bits, unsigned shift) {
    return (static_cast<std::uint32_t>(value) & ((1U << bits) - 1)) << shift;
  }
  static std::uint32_t dmaReadWord(const Statement& s) {
    return 1U << 31U | field(s.length, 4, 20) | field(s.count, 4, 16) | field(s.pitch, 4, 12) |
           (horizontal(s, 11) ^ 1U << 11U);
  }
  static std::uint32_t dmaWriteWord(const Statement& s) {
    return 2U << 30U | field(s.count, 7, 23) | field(s.length, 7, 16) | horizontal(s, 14);
  }
  static std::uint32_t vpmReadWord(const Statement& s) {
    return field(s.count, 4, 20) | field(s.pitch, 6, 12) | horizontal(s, 11) | 2U << 8U;
  }
  static std::uint32_t vpmWriteWord(const Statement& s) {
    return field(s.pitch, 6, 12) | horizontal(s, 11) | 2U << 8U;
  }

  void prepareVpm() {
    const Value me = graph_.qpuNumber;
    const auto shifted = [&](std::uint32_t by) {
      return maker_.alu(AddOp::Shl, me, maker_.constant(by));
    };
    const auto plus = [&](Value a, std::uint32_t b) {
      return maker_.alu(AddOp::Add, a, maker_.constant(b));
    };
    if (facts_.vpmByHand) {
      const auto minus = [&](std::uint32_t a, Value b) {
        return maker_.alu(AddOp::Sub, maker_.constant(a), b);
      };
      environment_[hidden(WriteWindow)] = minus(vpm::writeRows(vpm::kHandRow, 0), me);
      environment_[hidden(StoreSetup)] =
          minus(vpm::storeRow(vpm::kHandRow), shifted(vpm::kStoreRowShift));
      loadSetup_ = minus(vpm::loadRow(vpm::kHandRow), shifted(vpm::kLoadRowShift));
      readWindow_ = minus(vpm::readRow(vpm::kHandRow), me);
      return;
    }
    if (merge_) {
      const std::uint32_t shift = mostMerged() == 4 ? 2 : 1;
      environment_[hidden(WriteWindow)] = plus(shifted(shift), vpm::writeRows(0, 1));
      environment_[hidden(StoreSetup)] = shifted(vpm::kStoreRowShift + shift);
      maker_.effect(Op::VpmWriteSetup, maker_.constant(vpm::kNoStoreGap));
    } else if (facts_.stores) {
      const Value window = plus(me, vpm::writeRows(vpm::kStoreRow, vpm::kStoreRowDistance));
      if (graph_.keepsWriteWindow) maker_.effect(Op::VpmWriteSetup, window);
      environment_[hidden(WriteWindow)] = window;
      environment_[hidden(StoreSetup)] =
          plus(shifted(vpm::kStoreRowShift), vpm::storeRow(vpm::kStoreRow));
    }
    if (facts_.loads && facts_.stores) {
      const std::uint32_t row = merge_ ? vpm::kMergingLoadRow : vpm::kLoadRow;
      loadSetup_ = plus(shifted(vpm::kLoadRowShift), vpm::loadRow(row));
      readWindow_ = plus(me, vpm::readRow(row));
    }
  }

  void setUp(Op op, Hidden which, Value word) {
    maker_.effect(op, word);
    environment_[hidden(which)] = word;
  }

  // As the hardware moves a window of 64 rows by its stride.
  void advanceWindow() {
    const Value old = environment_[hidden(HandWriteWindow)];
    const Value mask = maker_.constant(63);
    const Value stride =
        maker_.alu(AddOp::And, maker_.alu(AddOp::Shr, old, maker_.constant(12)), mask);
    const Value moved = maker_.alu(AddOp::Add, old, stride);
    environment_[hidden(HandWriteWindow)] = maker_.alu(
        AddOp::Xor, old, maker_.alu(AddOp::And, maker_.alu(AddOp::Xor, old, moved), mask));
  }

  bool counting() const { return facts_.gathers && !gathers_.endIsKnown; }

  void count(std::uint32_t by) {
    if (!counting()) return;
    Value& outstanding = environment_[hidden(Outstanding)];
    outstanding = maker_.alu(AddOp::Add, outstanding, maker_.constant(by));
  }

  void waitForStore() {
    if (state_.pending == Pending::None) return;
    maker_.effect(Op::DmaStoreWait);
    state_.pending = Pending::None;
  }

  // --- stores to neighbouring places ---

  std::uint32_t mostMerged() const {
    return facts_.loads ? vpm::kMostMergedBesideLoads : vpm::kMostMerged;
  }

  void addTo(Sum& sum, Value v, std::uint32_t factor, int depth = 0) const {
    constexpr int most = 8;
    const ir::Instruction& i = graph_.values[v];
    const bool isAlu = i.kind == ir::Kind::Alu && depth < most;
    if (i.kind == ir::Kind::Constant || i.kind == ir::Kind::Literal) {
      sum.constant += factor * i.bits;
    } else if (isAlu && (i.add == AddOp::Add || i.add == AddOp::Sub)) {
      addTo(sum, i.a, factor, depth + 1);
      addTo(sum, i.b, i.add == AddOp::Add ? factor : 0U - factor, depth + 1);
    } else if (isAlu && i.add == AddOp::Shl && graph_.isConstant(i.b)) {
      addTo(sum, i.a, factor << (graph_.values[i.b].bits & 31U), depth + 1);
    } else {
      sum.add(v, factor);
    }
  }

  // Vectors that are stored one after the other, to places next to each other. Their
  // stores wait (with merge_) for the next one, over what touches no memory.
  struct Stores {
    std::uint32_t count = 0;
    Sum end;  // address after the last
    Value address = kNone;
    std::vector<Value> vectors;
    std::vector<std::uint32_t> sites;
    bool wait = false;
  };

  // Notes a store of 16 words; true when it waits for others.
  bool gatherStore(const Statement& s, Value value, Value address) {
    if (!optimise_ || facts_.vpmByHand || s.limit != detail::kNoExpression) {
      endStores();
      return false;
    }
    Sum here;
    addTo(here, address, 1);
    const bool follows = stores_.count != 0 && stores_.end == here;
    if (follows) foundNeighbours_ = true;
    if (!follows || stores_.count == mostMerged()) endStores();
    if (stores_.count == 0) stores_.address = address;
    ++stores_.count;
    constexpr std::uint32_t vectorBytes = 64;
    here.constant += vectorBytes;
    stores_.end = std::move(here);
    if (!merge_) return false;
    stores_.vectors.push_back(value);
    stores_.sites.push_back(site_);
    stores_.wait = stores_.wait || s.wait;
    return true;
  }

  void endStores() {
    if (stores_.count == 0) return;
    const Stores stores = std::move(stores_);
    stores_ = Stores();
    if (!merge_) return;
    const std::uint32_t after = site_;
    maker_.site(stores.sites.front());
    waitForStore();
    maker_.effect(Op::VpmWriteSetup, environment_[hidden(WriteWindow)]);
    for (std::size_t i = 0; i < stores.vectors.size(); ++i) {
      maker_.site(stores.sites[i]);
      maker_.effect(Op::VpmWrite, stores.vectors[i]);
    }
    maker_.site(stores.sites.front());
    maker_.effect(Op::VpmWriteSetup,
                  maker_.alu(AddOp::Add, environment_[hidden(StoreSetup)],
                             maker_.constant(vpm::storeRows(stores.count))));
    maker_.effect(Op::DmaStoreStart, stores.address);
    maker_.site(after);
    state_.pending = stores.wait ? Pending::StoreToWaitFor : Pending::Store;
    state_.stored = true;
  }

  void store(const Statement& s) {
    const Value value = evaluate(s.value);
    const Value address = evaluate(s.address);
    const Value limit = s.limit == detail::kNoExpression ? kNone : evaluate(s.limit);
    if (gatherStore(s, value, address)) return;
    Value& setup = environment_[hidden(StoreSetup)];
    Value word = setup;
    if (s.limit != detail::kNoExpression) {
      // Sixteen words less so many.
      const Value missing =
          maker_.alu(AddOp::Sub, maker_.constant(16), limit);
      word = maker_.alu(
          AddOp::Sub, setup,
          maker_.alu(AddOp::Shl, missing, maker_.constant(vpm::kStoreDepthShift)));
    }
    Value& window = environment_[hidden(WriteWindow)];
    if (merge_) word = maker_.alu(AddOp::Add, word, maker_.constant(vpm::storeRows(1)));
    if (facts_.vpmByHand || merge_) waitForStore();
    if (!graph_.keepsWriteWindow) maker_.effect(Op::VpmWriteSetup, window);
    maker_.effect(Op::VpmWrite, value);
    waitForStore();
    maker_.effect(Op::VpmWriteSetup, word);
    maker_.effect(Op::DmaStoreStart, address);
    if (!facts_.vpmByHand && !merge_) {
      // The other row is next.
      const auto exchange = [&](Value& v, std::uint32_t shift) {
        v = maker_.alu(AddOp::Xor, v, maker_.constant(vpm::kStoreRowDistance << shift));
      };
      exchange(setup, vpm::kStoreRowShift);
      exchange(window, 0);
    }
    state_.pending = s.wait ? Pending::StoreToWaitFor : Pending::Store;
    state_.stored = true;
    if (s.wait && !optimise_) waitForStore();
    if (!facts_.vpmByHand) return;
    const VpmNeeds& needs = byHand_.needs[s.site.number];
    if (needs.writeWindow)
      maker_.effect(Op::VpmWriteSetup, environment_[hidden(HandWriteWindow)]);
    if (needs.storeSetup) {
      waitForStore();
      maker_.effect(Op::VpmWriteSetup, environment_[hidden(HandStoreSetup)]);
    }
  }

  // The TMU's caches do not see stores of the same run: where one may have come
  // before, of this QPU or of another that a semaphore orders, go past them.
  Value load(const Expression& e) {
    const Value address = evaluate(e.a);
    endStores();
    const bool stale = state_.stored || (facts_.stores && state_.acquired);
    if (!stale) {
      // Consecutive loads take turns, but for TMU 0 where that is the gathers'.
      loadUnit_ ^= 1U;
      const bool shared = !facts_.gathers || gathers_.usesBothTmus;
      return maker_.load(address, shared ? loadUnit_ : std::uint8_t{1});
    }
    if (facts_.vpmByHand && byHand_.unread[at_->site.number])
      fail(*at_,
           "reads memory that a store before may have changed, which goes through the VPM; "
           "take the vectors that vpmSetupRead has announced first");
    waitForStore();
    maker_.effect(Op::VpmReadSetup, loadSetup_);
    maker_.effect(Op::DmaLoadStart, address);
    maker_.effect(Op::DmaLoadWait);
    maker_.effect(Op::VpmReadSetup, readWindow_);
    const Value words = maker_.effect(Op::VpmRead);
    if (facts_.vpmByHand && byHand_.needs[at_->site.number].loadSetup)
      maker_.effect(Op::VpmReadSetup, environment_[hidden(HandLoadSetup)]);
    return words;
  }

  // The last store is in memory, no gather is outstanding, every QPU is done:
  // then QPU 0 tells the host.
  void finish() {
    site_ = code::Object::kNoSite;
    maker_.site(site_);
    waitForStore();
    for (const std::uint8_t unit : gathers_.left) maker_.effect(Op::TmuReceive, kNone, 0, unit);
    if (counting()) receiveAll();
    const std::uint32_t semaphore = freeSemaphore();
    const std::uint32_t worker = newBlock();
    const std::uint32_t master = newBlock();
    const std::uint32_t interrupt = newBlock();
    const std::uint32_t end = newBlock();
    const Value zero = maker_.constant(0);
    branch(maker_.compare(ir::Test::Equal, graph_.qpuNumber, zero), false, master, worker);
    place(worker);
    maker_.effect(Op::SemaphoreRelease, kNone, semaphore);
    jump(end);
    place(master);
    repeat(maker_.alu(AddOp::Add, count_, maker_.constant(UINT32_MAX)), interrupt,
           [&] { maker_.effect(Op::SemaphoreAcquire, kNone, semaphore); });
    place(interrupt);
    maker_.effect(Op::HostInterrupt);
    jump(end);
    place(end);
  }

  void receiveAll() {
    const std::uint32_t done = newBlock();
    repeat(environment_[hidden(Outstanding)], done,
           [&] { maker_.effect(Op::TmuReceive, kNone, 0, 0); });
    place(done);
  }

  // Calls f so many times at run time, then goes to `then`.
  template <typename F>
  void repeat(Value times, std::uint32_t then, F f) {
    const Value zero = maker_.constant(0);
    const std::uint32_t preheader = newBlock();
    const std::uint32_t again = newBlock();
    branch(maker_.compare(ir::Test::Equal, times, zero), false, then, preheader);
    place(preheader);
    jump(again);
    ir::Loop l;
    l.preheader = preheader;
    l.header = l.last = again;
    loop_ = static_cast<std::uint32_t>(graph_.loops.size());
    graph_.loops.push_back(l);
    place(again);
    const Value left = maker_.phi(again);
    f();
    const Value less = maker_.alu(AddOp::Add, left, maker_.constant(UINT32_MAX));
    branch(maker_.compare(ir::Test::Equal, less, zero), false, then, again);
    graph_.arguments(left) = {times, less};
    loop_ = kNone;
  }

  std::uint32_t freeSemaphore() const {
    for (std::size_t s = kSemaphores; s-- > 0;)
      if (!facts_.semaphores.test(s)) return static_cast<std::uint32_t>(s);
    detail::raise<CompileError>(
        "kernel '" + source_.name +
            "': uses all 16 semaphores; one must be left for the end of the kernel, where QPU 0 "
            "waits for the others",
        {source_.name, "semaphore", -1, 0});
  }

  // What holds at a point of the kernel on every way there.
  struct State {
    Pending pending = Pending::None;  // at most
    bool stored = false;              // a store may have been made
    bool acquired = false;            // a semaphore may have been acquired

    void join(const State& o) {
      pending = std::max(pending, o.pending);
      stored = stored || o.stored;
      acquired = acquired || o.acquired;
    }
    void enterLoop(bool stores, bool waits, bool acquires) {
      if (stores) pending = std::max(pending, waits ? Pending::StoreToWaitFor : Pending::Store);
      stored = stored || stores;
      acquired = acquired || acquires;
    }
  };

  const Source& source_;
  const bool optimise_;
  const bool keepWriteWindow_;
  const bool merge_;  // stores to neighbouring places
  const detail::GatherPlan gathers_;
  ir::Graph graph_;
  Maker maker_;
  Facts facts_;
  std::vector<Value> environment_;  // of each variable; hidden ones last
  std::vector<std::uint32_t> order_;
  std::vector<std::uint32_t> computedIn_;
  std::vector<Value> valueOf_;
  std::vector<std::uint32_t> assignedIn_;
  std::uint32_t summaries_ = 0;
  std::uint32_t statement_ = 0;
  std::uint32_t site_ = code::Object::kNoSite;
  std::uint32_t loop_ = kNone;
  Value mask_ = kNone;
  Value count_ = kNone;
  Value loadSetup_ = kNone;
  Value readWindow_ = kNone;
  State state_;
  Stores stores_;
  bool foundNeighbours_ = false;
  const Statement* at_ = nullptr;
  VpmByHand byHand_;
  std::uint8_t loadUnit_ = 1;
  bool closing_ = false;  // a loop's condition after its body
};

}  // namespace

ir::Graph lower(const Source& source, const Options& options) {
  Lowering lowering(source, options, false);
  ir::Graph graph = lowering.run();
  if (!options.mergeStores || !lowering.foundNeighbours()) return graph;
  return Lowering(source, options, true).run();
}

}  // namespace qpu::compiler
