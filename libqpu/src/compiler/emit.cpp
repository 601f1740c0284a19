#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "compiler/coalesce_recurrences.hpp"
#include "compiler/compile.hpp"
#include "compiler/schedule.hpp"
#include "compiler/schedule_estimate.hpp"
#include "compiler/spill.hpp"
#include "error_facts.hpp"

namespace qpu::compiler {
namespace {

constexpr std::uint32_t kLeastRegisters = 7;  // with which spilling makes sense
constexpr double kWorthIt = 0.95;  // of an estimate: what is less different is chance
// Spread receives may take this much more by the estimate, which is for one QPU: several that share a TMU gain more.
constexpr double kSpreadMayTake = 1.1;
constexpr double kQpusOfSlice = 4;  // share two TMUs

isa::BranchCond opposite(isa::BranchCond c) {
  using isa::BranchCond;
  switch (c) {
    case BranchCond::AllZSet: return BranchCond::AnyZClear;
    case BranchCond::AllZClear: return BranchCond::AnyZSet;
    case BranchCond::AnyZSet: return BranchCond::AllZClear;
    case BranchCond::AnyZClear: return BranchCond::AllZSet;
    case BranchCond::AllNSet: return BranchCond::AnyNClear;
    case BranchCond::AllNClear: return BranchCond::AnyNSet;
    case BranchCond::AnyNSet: return BranchCond::AllNClear;
    case BranchCond::AnyNClear: return BranchCond::AllNSet;
    case BranchCond::AllCSet: return BranchCond::AnyCClear;
    case BranchCond::AllCClear: return BranchCond::AnyCSet;
    case BranchCond::AnyCSet: return BranchCond::AllCClear;
    case BranchCond::AnyCClear: return BranchCond::AllCSet;
    default: return c;
  }
}

// Blocks that do nothing and blocks that nothing leads to go.
void straighten(Function& function) {
  auto& blocks = function.blocks;
  for (Block& b : blocks)
    if (b.exit == Block::Exit::Branch &&
        (b.cond == isa::BranchCond::Always || b.taken == b.next)) {
      if (b.cond == isa::BranchCond::Always) b.next = b.taken;
      b.exit = Block::Exit::Jump;
    }
  const auto target = [&](std::uint32_t b) {
    for (std::size_t steps = 0; steps < blocks.size(); ++steps) {
      if (!blocks[b].operations.empty() || blocks[b].exit != Block::Exit::Jump) break;
      b = blocks[b].next;
    }
    return b;
  };
  for (Block& b : blocks) {
    if (b.exit != Block::Exit::End) b.next = target(b.next);
    if (b.exit == Block::Exit::Branch) b.taken = target(b.taken);
    if (b.exit == Block::Exit::Branch && b.taken == b.next) b.exit = Block::Exit::Jump;
  }
  std::vector<char> reached(blocks.size(), 0);
  std::vector<std::uint32_t> work{0};
  reached[0] = 1;
  while (!work.empty()) {
    const std::uint32_t b = work.back();
    work.pop_back();
    for (const std::uint32_t s : successors(blocks[b]))
      if (reached[s] == 0) {
        reached[s] = 1;
        work.push_back(s);
      }
  }
  std::vector<std::uint32_t> number(blocks.size(), 0);
  std::vector<Block> kept;
  for (std::size_t b = 0; b < blocks.size(); ++b)
    if (reached[b] != 0) {
      number[b] = static_cast<std::uint32_t>(kept.size());
      kept.push_back(std::move(blocks[b]));
    }
  for (Block& b : kept) {
    b.next = number[b.next];
    b.taken = number[b.taken];
  }
  blocks = std::move(kept);
}

// What is thrown when there are too few registers, whatever goes to memory.
struct NoRoom {
  std::string kernel;
  bool usesVpmByHand;
  std::uint32_t needed, registers;
};
[[noreturn]] void fail(const NoRoom& e) {
  detail::raise<CompileError>(
      "kernel '" + e.kernel + "' does not fit into " + std::to_string(e.registers) + " registers: up to " +
          std::to_string(e.needed) + " vectors are alive at once, and single instructions need copies of some" +
          (e.usesVpmByHand ? "; vectors cannot be kept in memory because the kernel sets up the VPM "
                             "or its DMA itself"
                           : "") +
          ". Keep fewer variables alive at once",
      {e.kernel, "", -1, 0});
}

class Emitter {
 public:
  Emitter(Function function, const Options& options)
      : function_(std::move(function)), options_(options) {}

  // False when the registers do not suffice.
  bool run() {
    live_ = findLiveness(function_);
    homes_ = findHomes(function_, live_, options_.fileRegisters);
    if (homes_.empty() && !live_.globals.empty()) return false;
    followTmus();
    const std::size_t n = function_.blocks.size();
    starts_.resize(n);
    lastWritten_.assign(n, 0);
    isDone_.assign(n, 0);
    predecessors_.resize(n);
    for (std::uint32_t b = 0; b < n; ++b)
      for (const std::uint32_t s : successors(function_.blocks[b])) predecessors_[s].push_back(b);
    for (std::uint32_t b = 0; b < n; ++b) {
      const std::size_t before = slots_.size();
      double waits = 0;
      if (!emitBlock(b, waits)) return false;
      cost_ += std::pow(10, std::min(function_.blocks[b].loopDepth, 5U)) *
               (static_cast<double>(slots_.size() - before) + waits);
    }
    return true;
  }

  // Instructions and waiting, where a loop is gone through ten times.
  double cost() const { return cost_; }

  code::Object finish(std::uint32_t spillBytes) {
    code::Object object;
    for (const Branch& branch : branches_)
      slots_[branch.at].instruction.immediate =
          static_cast<std::uint32_t>((static_cast<std::int64_t>(starts_[branch.target]) -
                                      static_cast<std::int64_t>(branch.at + kDelaySlots + 1)) *
                                     8);
    object.name = function_.name;
    object.parameters = function_.parameters;
    object.spillBytes = spillBytes;
    object.uniforms = function_.uniforms;
    object.sites = function_.sites;
    object.words.reserve(slots_.size());
    object.siteOf.reserve(slots_.size());
    for (const Slot& slot : slots_) {
      object.words.push_back(isa::encode(slot.instruction));
      object.siteOf.push_back(slot.site);
    }
    for (const Block& b : function_.blocks)
      for (const Operation& o : b.operations) object.usesSfu |= o.op == Op::Sfu;
    return object;
  }

 private:
  // Requests that are outstanding where blocks begin: the fewest and the most of
  // all paths.
  void followTmus() {
    const std::size_t n = function_.blocks.size();
    fewest_.assign(n, {kUnknown, kUnknown});
    most_.assign(n, {0, 0});
    fewest_[0] = {0, 0};
    std::vector<std::uint32_t> work{0};
    std::vector<char> queued(n, 0);
    while (!work.empty()) {
      const std::uint32_t b = work.back();
      work.pop_back();
      queued[b] = 0;
      std::array<std::uint32_t, 2> low = fewest_[b];
      std::array<std::uint32_t, 2> high = most_[b];
      for (const Operation& o : function_.blocks[b].operations) {
        const std::size_t u = o.unit & 1U;
        if (o.op == Op::TmuRequest) {
          ++low[u];
          high[u] = std::min(high[u] + 1, kTmuDepth);
        }
        if (o.op == Op::TmuReceive) {
          low[u] -= low[u] > 0 ? 1 : 0;
          high[u] -= high[u] > 0 ? 1 : 0;
        }
      }
      for (const std::uint32_t s : successors(function_.blocks[b])) {
        bool changed = false;
        for (std::size_t u = 0; u < 2; ++u) {
          changed |= low[u] < fewest_[s][u] || high[u] > most_[s][u];
          fewest_[s][u] = std::min(fewest_[s][u], low[u]);
          most_[s][u] = std::max(most_[s][u], high[u]);
        }
        if (!changed || queued[s] != 0) continue;
        queued[s] = 1;
        work.push_back(s);
      }
    }
  }

  std::uint64_t homesOf(const Bits& globals) const {
    std::uint64_t mask = 0;
    for (std::size_t g = 0; g < homes_.size(); ++g)
      if (globals.has(g)) mask |= std::uint64_t{1} << homes_[g];
    return mask;
  }

  // Registers that the instruction before the block may write.
  std::uint64_t unreadableAt(std::uint32_t b) const {
    std::uint64_t mask = 0;
    for (const std::uint32_t p : predecessors_[b]) {
      if (isDone_[p] != 0) {
        mask |= lastWritten_[p];
        continue;
      }
      for (const Operation& o : function_.blocks[p].operations)
        if (o.target != Operation::kNone && live_.indexOf[o.target] != Liveness::kLocal)
          mask |= std::uint64_t{1} << homes_[live_.indexOf[o.target]];
    }
    return mask;
  }

  // Whether the block runs often and reads the VPM so much that its order may matter.
  bool isWorthwhile(std::uint32_t b) const {
    constexpr std::ptrdiff_t kMany = 8;
    const std::vector<Operation>& all = function_.blocks[b].operations;
    return function_.blocks[b].loopDepth > 0 &&
           std::count_if(all.begin(), all.end(),
                         [](const Operation& o) { return o.op == Op::VpmRead; }) >= kMany;
  }

  // Other orders, in which the QPU waits less for memory, where the block is slowed down by that.
  void waitLess(const Graph& graph, ScheduleOptions so, ScheduledBlock& best, std::uint32_t b) const {
    using Receives = ScheduleOptions::Receives;
    const bool repeats = isLoop(b);
    const Surroundings around = surroundings(b);
    Estimate least = estimate(best, around);
    const auto attempt = [&](const Graph& order, Receives receives, bool lateWaits, std::uint32_t window) {
      if (least.waits <= 0 && (!repeats || least.whenSlow <= least.takes)) return;
      so.receives = receives;
      so.lateWaits = lateWaits;
      so.window = window;
      std::optional<ScheduledBlock> other = schedule(order, so);
      if (!other) return;
      const Estimate e = estimate(*other, around);
      const bool isBetter = std::tie(e.takes, e.whenSlow) < std::tie(least.takes, least.whenSlow);
      if (receives == Receives::Spread ? e.takes > kSpreadMayTake * least.takes
          : repeats                    ? !isBetter
                                       : e.takes >= kWorthIt * least.takes)
        return;
      least = e;
      best = std::move(*other);
    };
    const std::uint32_t window = so.window;
    attempt(graph, Receives::AfterRequests, false, window);
    if (!repeats) return;
    attempt(graph, Receives::AfterRequests, true, window);
    attempt(graph, Receives::Early, true, window);
    attempt(graph, Receives::Early, false, 1);  // the order of the source
    if (fewest_[b][0] + fewest_[b][1] == 0) return;
    // The next run of the block receives what this one requests.
    Graph early = graph;
    prioritiseRequests(early);
    attempt(early, Receives::AfterRequests, false, window);
    // Without waiting the QPUs of a slice would request more than its TMU serves.
    if (least.takes - least.waits < kQpusOfSlice * kTmuRequest * static_cast<double>(requestsOf(b)))
      attempt(early, Receives::Spread, false, window);
  }

  // Of the TMU that has more of them.
  std::ptrdiff_t requestsOf(std::uint32_t b) const {
    const std::vector<Operation>& all = function_.blocks[b].operations;
    const auto of = [&](unsigned unit) {
      return std::count_if(all.begin(), all.end(),
                           [&](const Operation& o) { return o.op == Op::TmuRequest && (o.unit & 1U) == unit; });
    };
    return std::max(of(0), of(1));
  }

  bool isLoop(std::uint32_t b) const {
    const Successors next = successors(function_.blocks[b]);
    return std::find(next.begin(), next.end(), b) != next.end();
  }
  Surroundings surroundings(std::uint32_t b) const {
    return {fewest_[b], function_.blocks[b].loopDepth > 0, isLoop(b)};
  }

  std::optional<ScheduledBlock> scheduleBlock(std::uint32_t b) const {
    BlockContext context;
    context.function = &function_;
    context.live = &live_;
    context.homes = &homes_;
    context.block = b;
    context.fewestInFlight = fewest_[b];
    context.mostInFlight = most_[b];
    context.fuse = options_.level > 0;
    context.setNoSwap = b == 0 && function_.usesTwoTmus;
    ScheduleOptions so;
    so.fileRegisters = options_.fileRegisters;
    so.pair = options_.level > 0;
    so.occupied = homesOf(live_.in[b]);
    so.reserved = homesOf(live_.out[b]);
    so.unreadable = unreadableAt(b);
    const Graph graph = buildGraph(context);
    static constexpr std::array<std::uint32_t, 4> kWindows{160, 40, 8, 1};
    for (const std::uint32_t window : kWindows) {
      if (options_.level == 0 && window != 1) continue;
      so.window = window;
      std::optional<ScheduledBlock> result = schedule(graph, so);
      if (!result) continue;
      if (window == kWindows.front() && isWorthwhile(b)) {
        // Neither way is always the shorter.
        so.alternateFiles = true;
        std::optional<ScheduledBlock> other = schedule(graph, so);
        if (other && other->slots.size() < result->slots.size()) return other;
        so.alternateFiles = false;
      }
      if (options_.level > 0 && function_.blocks[b].loopDepth > 0) waitLess(graph, so, *result, b);
      return result;
    }
    if (!context.fuse) return std::nullopt;
    context.fuse = false;
    return schedule(buildGraph(context), so);
  }

  void push(const Slot& slot) {
    slots_.push_back(slot);
  }
  void pushNops(std::size_t count) {
    for (std::size_t k = 0; k < count; ++k) push({});
  }

  void pushBranch(isa::BranchCond cond, std::uint32_t target, std::uint32_t site) {
    Slot slot;
    slot.instruction.form = isa::Form::Branch;
    slot.instruction.branchCond = cond;
    slot.instruction.branchRelative = true;
    slot.site = site;
    branches_.push_back({slots_.size(), target});
    push(slot);
  }

  bool emitBlock(std::uint32_t b, double& waits) {
    const Block& block = function_.blocks[b];
    std::optional<ScheduledBlock> scheduled = scheduleBlock(b);
    if (!scheduled) return false;
    ScheduledBlock& code = *scheduled;
    waits = estimate(code, surroundings(b)).waits;
    isDone_[b] = 1;
    lastWritten_[b] = code.lastWritten;
    if (code.slots.empty()) lastWritten_[b] = unreadableAt(b);
    while (code.slots.size() < static_cast<std::size_t>(code.minimumLength)) {
      code.slots.emplace_back();
      lastWritten_[b] = 0;
    }
    starts_[b] = slots_.size();
    const bool isLast = b + 1 == function_.blocks.size();
    const auto isNext = [&](std::uint32_t target) { return !isLast && target == b + 1; };
    if (block.exit == Block::Exit::End) {
      for (const Slot& s : code.slots) push(s);
      Slot end;
      end.instruction.signal = isa::Signal::End;
      push(end);
      pushNops(2);
      return true;
    }
    if (block.exit == Block::Exit::Jump && isNext(block.next)) {
      for (const Slot& s : code.slots) push(s);
      return true;
    }
    isa::BranchCond cond = isa::BranchCond::Always;
    std::uint32_t taken = block.next;
    bool jumpsToo = false;
    if (block.exit == Block::Exit::Branch) {
      cond = block.cond;
      taken = block.taken;
      if (isNext(block.taken)) {
        cond = opposite(cond);
        taken = block.next;
      } else {
        jumpsToo = !isNext(block.next);
      }
    }
    const std::size_t size = code.slots.size();
    const std::size_t at = branchAt(code, cond != isa::BranchCond::Always);
    for (std::size_t k = 0; k < at; ++k) push(code.slots[k]);
    pushBranch(cond, taken, block.site);
    for (std::size_t k = at; k < size; ++k) push(code.slots[k]);
    if (size < at + kDelaySlots) {
      pushNops(at + kDelaySlots - size);
      lastWritten_[b] = 0;
    }
    if (jumpsToo) {
      pushBranch(isa::BranchCond::Always, block.next, block.site);
      pushNops(kDelaySlots);
    }
    return true;
  }

  struct Branch {
    std::size_t at;
    std::uint32_t target;
  };

  Function function_;
  const Options& options_;
  Liveness live_;
  std::vector<Place> homes_;
  static constexpr std::uint32_t kUnknown = UINT32_MAX;
  std::vector<std::array<std::uint32_t, 2>> fewest_, most_;
  std::vector<std::vector<std::uint32_t>> predecessors_;
  std::vector<std::size_t> starts_;
  std::vector<std::uint64_t> lastWritten_;
  std::vector<char> isDone_;
  std::vector<Branch> branches_;
  std::vector<Slot> slots_;
  double cost_ = 0;
};

struct Emitted {
  code::Object object;
  double cost = 0;
  bool hasSpilled = false;  // or computes vectors again
};

}  // namespace

namespace {

Emitted emitWithCost(Function function, const Options& options) {
  straighten(function);
  coalesceRecurrences(function);
  const std::uint32_t registers = 2 * static_cast<std::uint32_t>(options.fileRegisters);
  const std::uint32_t most = pressure(function);
  if (most <= registers) {
    Emitter emitter(function, options);
    if (emitter.run()) return {emitter.finish(0), emitter.cost(), false};
  }
  // Computing vectors again costs less than memory, and is always possible. Every
  // limit that leaves the scheduler more room costs more of either.
  for (const bool memory : {false, true}) {
    if (memory && function.usesVpmByHand) break;
    if (memory && (function.keepsWriteWindow || function.mergesStores)) throw SpillsNeeded();
    for (const std::uint32_t spared : {0U, 1U, 2U, 4U, 8U, 16U, 24U, 32U, 40U}) {
      if (spared + kLeastRegisters > registers) break;
      Function smaller = function;
      std::uint32_t bytes = 0;
      if (!spill(smaller, registers - spared, memory, bytes)) continue;
      Emitter emitter(std::move(smaller), options);
      if (emitter.run()) return {emitter.finish(bytes), emitter.cost(), true};
    }
  }
  throw NoRoom{function.name, function.usesVpmByHand, most, registers};
}

// `front` is the level of the front half.
Emitted compileAt(const detail::Source& source, const Options& options, int front) {
  Options selecting = options;
  selecting.level = front;
  try {
    return emitWithCost(select(source, selecting), options);
  } catch (const SpillsNeeded&) {
    selecting.keepWriteWindow = false;
    selecting.mergeStores = false;
    return emitWithCost(select(source, selecting), options);
  }
}

}  // namespace

code::Object emit(Function function, const Options& options) {
  try {
    return emitWithCost(std::move(function), options).object;
  } catch (const NoRoom& e) {
    fail(e);
  }
}

code::Object compile(const detail::Source& source, const Options& options) {
  std::optional<Emitted> best;
  std::optional<NoRoom> failure;
  // What the front half does for speed takes registers; where they do not suffice, that may cost more than it gains.
  for (int front = options.level; front >= 0 && (!best || best->hasSpilled); --front) {
    try {
      Emitted other = compileAt(source, options, front);
      if (!best || other.cost < kWorthIt * best->cost) best = std::move(other);
    } catch (const NoRoom& e) {
      if (!failure) failure = e;
    }
  }
  if (!best) fail(*failure);
  return std::move(best->object);
}

}  // namespace qpu::compiler
