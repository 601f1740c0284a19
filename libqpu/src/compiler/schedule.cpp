#include "compiler/schedule.hpp"

#include <algorithm>
#include <array>

#include "isa/access.hpp"

namespace qpu::compiler {
namespace {

namespace address = isa::address;
using isa::Mux;
using isa::Signal;

constexpr std::size_t kScanned = 40;      // ready operations looked at for one instruction
constexpr std::size_t kConsidered = 16;   // and of those that could go, how many are kept
constexpr std::size_t kStarts = 5;        // of these, each is tried as the first of a pair
constexpr int kMaxIdle = 16;             // empty instructions in a row that mean no progress
constexpr int kIdleBeforeEviction = 3;
constexpr int kIdleBeforeReceiving = 2;  // what a register that was just written makes the requests wait
// Instructions from one receive to the last one of the block. QPUs of a slice that wait for the same line of memory
// continue at the same time, and their next requests queue at the TMU. With a gap as long as a request, and the branch
// that often falls into it, those that the other TMU served last continue later, and the requests spread.
constexpr std::int32_t kReceiveGap = kTmuRequest;
constexpr std::uint32_t kNextTo = 2;
constexpr unsigned kManyReads = 3;
constexpr int kPlenty = 16;               // free registers
constexpr std::uint32_t kNear = 8;        // operations that are close to each other
constexpr int kTurnCost = 4;              // more than what else speaks for a file
constexpr std::int32_t kRotationBase = 48;  // small-immediate code of a rotation by 0

std::uint32_t bit(Place p) { return 1U << (p % kFileB); }

Mux muxOf(Place p) {
  if (isFileA(p)) return Mux::A;
  if (isFileB(p)) return Mux::B;
  return static_cast<Mux>(p - kR0);
}

// What one operation would need of an instruction if it went now.
struct Plan {
  std::uint32_t node = kNone;   // or, without a node, a copy of `value`:
  std::uint32_t value = kNone;
  std::uint32_t copyFor = kNone;
  bool relocates = false;       // the vector leaves its old place
  std::uint8_t pipes = 0;
  std::uint8_t portA = address::kNop;
  std::uint8_t portB = address::kNop;
  std::int16_t small = -1;
  Mux a = Mux::R0, b = Mux::R0;
  std::uint8_t exclusive = 0;
  bool setsFlags = false;
  bool whole = false;           // fills the instruction
  bool takesR4 = false, takesR5 = false;
  Place fixed = kNowhere;       // the register that is written
  std::uint8_t files = kToNeither;  // where the result may go
  bool choosesPlace = false;
  bool wantsAccumulator = false;
  std::array<std::uint32_t, 2> reads{kNone, kNone};  // values
  std::int32_t priority = 0;
};

struct Free {
  std::uint32_t a = 0, b = 0, accumulators = 0;
  bool r4 = false, r5 = false;
};

struct Bundle {
  std::array<const Plan*, 4> plans{};
  unsigned count = 0;
  unsigned alus = 0;
  std::uint8_t portA = address::kNop;
  std::uint8_t portB = address::kNop;
  std::int16_t small = -1;
  std::uint8_t exclusive = 0;
  bool receives = false;
  bool whole = false;
};

class Scheduler {
 public:
  Scheduler(const Graph& graph, const ScheduleOptions& options)
      : graph_(graph), options_(options), nodes_(graph.nodes.size()), values_(graph.values.size()) {
    occupant_.fill(kNone);
    readableAt_.fill(0);
    const std::uint32_t all = options.fileRegisters >= 32
                                  ? UINT32_MAX
                                  : (1U << static_cast<unsigned>(options.fileRegisters)) - 1U;
    poolA_ = all & ~static_cast<std::uint32_t>(options.reserved);
    poolB_ = all & ~static_cast<std::uint32_t>(options.reserved >> 32U);
    freeA_ = poolA_ & ~static_cast<std::uint32_t>(options.occupied);
    freeB_ = poolB_ & ~static_cast<std::uint32_t>(options.occupied >> 32U);
    countAlive();
    for (std::uint32_t v = 0; v < values_.size(); ++v) {
      for (const std::uint32_t u : users(v))
        for (std::size_t pipe = 0; pipe < 2; ++pipe)
          if (readsInPipe(graph.nodes[u], pipe)) ++values_[v].byPipe[pipe];
      countReads(v, countedAt(v), 1);
    }
    for (Place p = 0; p < kR0; ++p)
      if (((options.unreadable >> p) & 1U) != 0) readableAt_[p] = 1;
    for (std::uint32_t v = 0; v < values_.size(); ++v) {
      const Value& value = graph.values[v];
      values_[v].reads = value.reads;
      values_[v].updates = value.updates;
      values_[v].rotations = value.rotations;
      if (value.liveIn) {
        values_[v].main = value.home;
        occupant_[value.home] = v;
      }
    }
    findReceives();
    for (std::uint32_t n = 0; n < nodes_.size(); ++n) {
      const Node& node = graph.nodes[n];
      nodes_[n].waits = node.waitsFor;
      if (node.removed) {
        nodes_[n].done = true;
        continue;
      }
      ++left_;
      if (!needsReceive_[n]) ++independentLeft_;
      if (node.form == Node::Form::Receive) ++receivesLeft_;
      count(node, 1);
      if (node.waitsFor == 0) makeReady(n);
    }
  }

  std::optional<ScheduledBlock> run() {
    while (left_ > 0) {
      while (oldest_ < nodes_.size() && nodes_[oldest_].done) ++oldest_;
      gather();
      Bundle bundle = choose();
      if (bundle.count == 0) {
        bundle = chooseEarly();
        if (bundle.count == 0) {
          if (++idle_ > kMaxIdle) return std::nullopt;
        }
      }
      if (bundle.count != 0) idle_ = 0;
      commit(bundle);
      ++cycle_;
    }
    return std::move(result_);
  }

 private:
  struct NodeState {
    std::uint32_t waits = 0;
    std::int32_t earliest = 0;  // may go
    std::int32_t expected = 0;  // would not stall
    bool done = false;
  };
  struct ValueState {
    Place main = kNowhere;
    Place copy = kNowhere;
    std::uint32_t reads = 0, updates = 0, rotations = 0;
    std::uint32_t copyFor = kNone;
    std::array<int, 2> byPipe{};  // reads by the ADD and the MUL pipe alone
  };
  // A vector that an operation needs elsewhere.
  struct Request {
    std::uint32_t value;
    std::uint32_t node;
    std::uint8_t allowed;  // kToA, kToB, kToNeither: an accumulator
    std::int32_t priority;
  };

  // Marks the operations that depend on a result of a TMU.
  void findReceives() {
    needsReceive_.assign(nodes_.size(), false);
    for (std::uint32_t n = 0; n < nodes_.size(); ++n) {
      if (graph_.nodes[n].form == Node::Form::Receive) needsReceive_[n] = true;
      if (!needsReceive_[n]) continue;
      for (std::uint32_t e = graph_.firstEdge[n]; e < graph_.firstEdge[n + 1]; ++e)
        needsReceive_[graph_.edges[e].to] = true;
    }
  }

  void count(const Node& n, int by) {
    if (n.pipes == kAddPipe) addLeft_ += by;
    if (n.pipes == kMulPipe) mulLeft_ += by;
    if (n.pipes == (kAddPipe | kMulPipe)) eitherLeft_ += by;
  }

  bool before(std::uint32_t x, std::uint32_t y) const {
    const std::int32_t hx = graph_.nodes[x].height;
    const std::int32_t hy = graph_.nodes[y].height;
    return hx != hy ? hx > hy : x < y;
  }
  std::vector<std::uint32_t>& queueOf(std::uint32_t n) {
    const Node& node = graph_.nodes[n];
    if (node.result == kR5) return forR5_;
    if (node.result == kR4) return forR4_;
    return ready_;
  }
  void makeReady(std::uint32_t n) {
    auto& queue = queueOf(n);
    queue.insert(std::upper_bound(queue.begin(), queue.end(), n,
                                  [this](std::uint32_t x, std::uint32_t y) { return before(x, y); }),
                 n);
  }
  void takeReady(std::uint32_t n) {
    auto& queue = queueOf(n);
    queue.erase(std::lower_bound(queue.begin(), queue.end(), n,
                                 [this](std::uint32_t x, std::uint32_t y) { return before(x, y); }));
  }

  bool isNeeded(std::uint32_t v) const {
    return values_[v].reads != 0 || values_[v].updates != 0 || graph_.values[v].liveOut;
  }
  bool isDead(std::uint32_t v) const { return !isNeeded(v); }

  void freePlace(Place p) {
    if (p == kNowhere) return;
    occupant_[p] = kNone;
    if (isFileA(p)) freeA_ |= bit(p) & poolA_;
    if (isFileB(p)) freeB_ |= bit(p) & poolB_;
  }
  void occupy(Place p, std::uint32_t v) {
    occupant_[p] = v;
    if (isFileA(p)) freeA_ &= ~bit(p);
    if (isFileB(p)) freeB_ &= ~bit(p);
  }
  // Counts the reads that are left of a vector that is, or will be, at `p`.
  void countReads(std::uint32_t v, Place p, int sign) {
    if (!isFile(p)) return;
    for (std::size_t pipe = 0; pipe < 2; ++pipe)
      toRead_[pipe][isFileA(p) ? 0 : 1] += sign * values_[v].byPipe[pipe];
  }
  static bool readsInPipe(const Node& n, std::size_t pipe) {
    return n.rotate == 0 && n.pipes == (pipe == 0 ? kAddPipe : kMulPipe);
  }
  // Where the reads of v are counted: at home until it is elsewhere.
  Place countedAt(std::uint32_t v) const {
    return values_[v].main != kNowhere ? values_[v].main : graph_.values[v].home;
  }

  void release(std::uint32_t v) {
    if (isCounted_[v] != 0) addAlive(lastUse_[v], -1);
    freePlace(values_[v].main);
    freePlace(values_[v].copy);
    values_[v].main = values_[v].copy = kNowhere;
  }

  int freeRegisters() const { return __builtin_popcount(freeA_) + __builtin_popcount(freeB_); }

  // A copy in an accumulator that nothing waits for.
  bool isDroppable(Place p) const {
    const std::uint32_t v = occupant_[p];
    if (v == kNone || values_[v].copy != p) return false;
    return values_[v].rotations == 0 && !isHeld(v);
  }
  // The operation that the vector was copied or moved for is still to come.
  bool isHeld(std::uint32_t v) const {
    return values_[v].copyFor != kNone && !nodes_[values_[v].copyFor].done;
  }

  // Places

  bool isReadable(Place p) const { return p != kNowhere && readableAt_[p] <= cycle_; }

  enum class Found { Yes, Later, Elsewhere };

  // Where a rotation finds its vector.
  Found findRotated(const Node& n, std::uint32_t v, Place& place) const {
    bool coming = false;
    for (const Place p : {values_[v].main, values_[v].copy}) {
      if (p == kNowhere) continue;
      const bool full = isAccumulator(p);
      const bool quad = n.quadSource && (isFileA(p) || p == kR4);
      if (!full && !quad) continue;
      if (readableAt_[p] + (isFileA(p) ? 0 : 1) <= cycle_) {
        place = p;
        return Found::Yes;
      }
      coming = true;
    }
    return coming ? Found::Later : Found::Elsewhere;
  }

  // Places of up to two vectors, of different files where both are in files.
  // `portBTaken`: a small immediate is there.
  Found findPlaces(std::uint32_t x, std::uint32_t y, bool portBTaken, Place& px, Place& py) const {
    bool coming = false;
    const std::array<Place, 2> xs = placesOf(x);
    const std::array<Place, 2> ys = y == kNone ? std::array<Place, 2>{kNowhere, kNowhere} : placesOf(y);
    for (const Place p : xs) {
      if (p == kNowhere || (portBTaken && isFileB(p))) continue;
      if (y == kNone) {
        if (isReadable(p)) {
          px = p;
          return Found::Yes;
        }
        coming = true;
        continue;
      }
      for (const Place q : ys) {
        if (q == kNowhere || (portBTaken && isFileB(q))) continue;
        if (p != q && ((isFileA(p) && isFileA(q)) || (isFileB(p) && isFileB(q)))) continue;
        if (isReadable(p) && isReadable(q)) {
          px = p;
          py = q;
          return Found::Yes;
        }
        coming = true;
      }
    }
    return coming ? Found::Later : Found::Elsewhere;
  }
  std::array<Place, 2> placesOf(std::uint32_t v) const {
    return {values_[v].copy, values_[v].main};
  }

  static void usePort(Plan& plan, Place p) {
    if (isFileA(p)) plan.portA = p;
    if (isFileB(p)) plan.portB = static_cast<std::uint8_t>(p - kFileB);
  }

  // What node `n` needs; false when it cannot go now.
  bool planNode(std::uint32_t n, Plan& plan) {
    const Node& node = graph_.nodes[n];
    plan.node = n;
    plan.priority = node.height;
    plan.pipes = node.pipes;
    plan.exclusive = node.exclusive;
    plan.setsFlags = node.setsFlags;
    plan.whole = node.form != Node::Form::Alu && node.form != Node::Form::Receive &&
                 node.form != Node::Form::Wait;
    if (!planSources(n, node, plan)) return false;
    return planTarget(node, plan);
  }

  bool planSources(std::uint32_t n, const Node& node, Plan& plan) {
    if (node.a.isValue()) plan.reads[0] = node.a.number;
    if (node.b.isValue() && !(node.a.isValue() && node.a.number == node.b.number))
      plan.reads[1] = node.b.number;
    if (node.rotate != 0) {
      Place p = kNowhere;
      if (node.rotate == kRotateByR5 && readableAt_[kR5] + 1 > cycle_) return false;
      if (node.a.isValue()) {
        const Found found = findRotated(node, node.a.number, p);
        if (found == Found::Elsewhere) request(node.a.number, n, kToNeither);
        if (found != Found::Yes) return false;
        usePort(plan, p);
        plan.a = plan.b = muxOf(p);
      }
      plan.small = static_cast<std::int16_t>(
          kRotationBase + (node.rotate == kRotateByR5 ? 0 : node.rotate));
      plan.portB = static_cast<std::uint8_t>(plan.small);
      return true;
    }
    for (const Source* s : {&node.a, &node.b}) {
      if (s->kind == Source::Kind::Small) {
        if (plan.small >= 0 && plan.small != static_cast<int>(s->number)) return false;
        plan.small = static_cast<std::int16_t>(s->number);
        plan.portB = static_cast<std::uint8_t>(s->number);
      }
    }
    Place pa = kNowhere;
    Place pb = kNowhere;
    const bool va = node.a.isValue();
    const bool vb = node.b.isValue();
    Found found = Found::Yes;
    if (va && vb && node.a.number == node.b.number) {
      found = findPlaces(node.a.number, kNone, plan.small >= 0, pa, pa);
      pb = pa;
    } else if (va && vb) {
      found = findPlaces(node.a.number, node.b.number, false, pa, pb);
    } else if (va) {
      found = findPlaces(node.a.number, kNone, plan.small >= 0, pa, pa);
    } else if (vb) {
      found = findPlaces(node.b.number, kNone, plan.small >= 0, pb, pb);
    }
    if (found == Found::Elsewhere) {
      requestOther(n, node, plan.small >= 0);
      return false;
    }
    if (found == Found::Later) return false;
    usePort(plan, pa);
    usePort(plan, pb);
    plan.a = muxOfSource(node.a, pa, plan);
    plan.b = node.b.kind == Source::Kind::None ? plan.a : muxOfSource(node.b, pb, plan);
    return true;
  }

  static Mux muxOfSource(const Source& s, Place p, Plan& plan) {
    switch (s.kind) {
      case Source::Kind::Value: return muxOf(p);
      case Source::Kind::Small: return Mux::B;
      case Source::Kind::ReadB: plan.portB = static_cast<std::uint8_t>(s.number); return Mux::B;
      case Source::Kind::ReadA:
      case Source::Kind::ReadEither:
        plan.portA = static_cast<std::uint8_t>(s.number);
        return Mux::A;
      default: return Mux::R0;
    }
  }

  bool planTarget(const Node& node, Plan& plan) {
    if (node.homecoming) {
      const Value& v = graph_.values[node.a.number];
      plan.relocates = true;
      plan.value = node.a.number;
      setHome(plan, v.home);
      return true;
    }
    if (node.result == kR4) plan.takesR4 = true;
    if (node.result == kR5) plan.takesR5 = true;
    if (node.address != address::kNop || node.target == kNone || node.result != kNowhere) {
      plan.files = node.files;
      return true;
    }
    const Value& v = graph_.values[node.target];
    const ValueState& state = values_[node.target];
    if (state.main != kNowhere) {  // an update
      plan.fixed = state.main;
      plan.files = fileOf(state.main);
    } else if (v.liveOut) {
      setHome(plan, v.home);
    } else if (isNeeded(node.target)) {
      plan.choosesPlace = true;
      plan.files = 0;
      plan.wantsAccumulator = v.updates == 0 && isShortLived(node.target);
    }
    return true;
  }
  static std::uint8_t fileOf(Place p) {
    return isFileA(p) ? kToA : isFileB(p) ? kToB : kToNeither;
  }
  static void setHome(Plan& plan, Place home) {
    plan.fixed = home;
    plan.files = fileOf(home);
  }

  // Copies

  void request(std::uint32_t v, std::uint32_t n, std::uint8_t allowed) {
    for (const Request& r : requests_)
      if (r.value == v) return;
    requests_.push_back({v, n, allowed, graph_.nodes[n].height});
  }

  // Both vectors are in one file, or one is in file B beside a small immediate.
  void requestOther(std::uint32_t n, const Node& node, bool small) {
    std::uint32_t v = node.a.isValue() ? node.a.number : node.b.number;
    if (small) {
      if (node.b.isValue()) v = node.b.number;
      request(v, n, kToA | kToNeither);
      return;
    }
    // Rather the one that is read again.
    if (node.b.isValue() && values_[node.b.number].reads > values_[v].reads) v = node.b.number;
    request(v, n, static_cast<std::uint8_t>((isFileA(values_[v].main) ? kToB : kToA) | kToNeither));
  }

  bool planCopy(std::uint32_t v, bool relocates, std::uint8_t allowed, std::uint32_t node,
                std::int32_t priority, Plan& plan) const {
    const Place from = isReadable(values_[v].main) ? values_[v].main : values_[v].copy;
    if (!isReadable(from)) return false;
    plan.value = v;
    plan.copyFor = node;
    plan.relocates = relocates;
    plan.pipes = kAddPipe | kMulPipe;
    usePort(plan, from);
    plan.a = plan.b = muxOf(from);
    plan.choosesPlace = true;
    plan.files = allowed;
    plan.priority = priority;
    return true;
  }

  void addPlan(const Plan& plan) {
    std::size_t at = plans_.size();
    plans_.push_back(plan);
    for (; at > 0 && plans_[at - 1].priority < plan.priority; --at) plans_[at] = plans_[at - 1];
    plans_[at] = plan;
  }

  void planRequests() {
    std::size_t done = 0;
    for (const Request& r : requests_) {
      if (++done > 3) break;
      ValueState& state = values_[r.value];
      if (state.copy != kNowhere) {
        if (isHeld(r.value)) continue;
        freePlace(state.copy);
        state.copy = kNowhere;
      }
      Plan plan;
      const bool leaves = state.main >= kR4 && !isPinned(r.value);
      const bool file = ((r.allowed & kToA) != 0 && freeA_ != 0) ||
                        ((r.allowed & kToB) != 0 && freeB_ != 0);
      if (!file && accumulators() == 0) {
        makeRoom(r);
        continue;
      }
      if (planCopy(r.value, leaves, r.allowed, r.node, r.priority, plan)) addPlan(plan);
    }
  }

  std::uint32_t accumulators() const {
    std::uint32_t mask = 0;
    for (Place p = kR0; p < kR4; ++p)
      if (occupant_[p] == kNone || isDroppable(p)) mask |= 1U << (p - kR0);
    return mask;
  }

  // An accumulator for a vector that is needed there.
  void makeRoom(const Request& r) {
    std::uint32_t victim = kNone;
    std::int32_t least = INT32_MAX;
    for (Place p = kR0; p < kR4; ++p) {
      const std::uint32_t v = occupant_[p];
      if (v == kNone || v == r.value) continue;
      const bool held = isHeld(v);
      if (values_[v].copy == p && !held) {
        freePlace(p);
        values_[v].copy = kNowhere;
        return;
      }
      if (held || (idle_ == 0 && values_[v].rotations == 0 && isShortLived(v))) continue;
      std::int32_t urgency = 0;
      for (const std::uint32_t u : users(v))
        if (!nodes_[u].done && nodes_[u].waits == 0) urgency = std::max(urgency, graph_.nodes[u].height);
      if (urgency < least) {
        least = urgency;
        victim = v;
      }
    }
    Plan plan;
    if (victim != kNone &&
        planCopy(victim, true, kToA | kToB, kNone, r.priority, plan))
      addPlan(plan);
  }

  struct Users {
    const std::uint32_t* first;
    const std::uint32_t* last;
    const std::uint32_t* begin() const { return first; }
    const std::uint32_t* end() const { return last; }
  };
  Users users(std::uint32_t v) const {
    const std::uint32_t* first = graph_.users.data() + graph_.values[v].firstUse;
    return {first, first + graph_.values[v].uses};
  }

  // The amount of a rotation stays in r5.
  bool isPinned(std::uint32_t v) const {
    const Users all = users(v);
    return std::any_of(all.begin(), all.end(), [&](std::uint32_t u) {
      const Node& n = graph_.nodes[u];
      return n.rotate == kRotateByR5 && n.b.isValue() && n.b.number == v;
    });
  }

  bool inWindow(std::uint32_t n) const { return n < oldest_ + options_.window; }

  bool mayGo(std::uint32_t n) const {
    return inWindow(n) && nodes_[n].earliest <= cycle_;
  }

  // Candidates

  void gather() {
    plans_.clear();
    requests_.clear();
    const std::int32_t r5Waiter = firstHeight(forR5_);
    const std::int32_t r4Waiter = firstHeight(forR4_);
    std::size_t scanned = 0;
    bool sawOldest = false;
    for (const std::uint32_t n : ready_) {
      if (++scanned > kScanned || plans_.size() >= kConsidered) break;
      sawOldest |= n == oldest_;
      consider(n, r4Waiter, r5Waiter);
    }
    if (!sawOldest && oldest_ < nodes_.size() && nodes_[oldest_].waits == 0 &&
        graph_.nodes[oldest_].result == kNowhere)
      consider(oldest_, r4Waiter, r5Waiter);
    considerFirst(forR5_);
    considerFirst(forR4_);
    if (r4Waiter > 0) evictR4(r4Waiter);
    planRequests();
  }

  std::int32_t firstHeight(const std::vector<std::uint32_t>& queue) const {
    for (const std::uint32_t n : queue)
      if (mayGo(n) && nodes_[n].expected <= cycle_) return graph_.nodes[n].height;
    return 0;
  }

  // Whether the operation, for which the QPU may have to wait, is put off as long as others can go.
  bool isPutOff(std::uint32_t n) {
    const Node::Form form = graph_.nodes[n].form;
    if (form == Node::Form::Wait) return options_.lateWaits;
    if (form != Node::Form::Receive) return false;
    if (options_.receives == ScheduleOptions::Receives::Soon) return false;
    if (options_.receives == ScheduleOptions::Receives::Spread && receivesLeft_ == 1)
      return independentLeft_ > 0 || isInGap();
    while (firstRequest_ < nodes_.size() && (nodes_[firstRequest_].done || !isRequest(graph_.nodes[firstRequest_])))
      ++firstRequest_;
    return firstRequest_ < n;
  }

  bool isInGap() const {
    return options_.receives == ScheduleOptions::Receives::Spread && receivesLeft_ == 1 && cycle_ < gapEnds_;
  }

  void consider(std::uint32_t n, std::int32_t r4Waiter, std::int32_t r5Waiter) {
    if (!mayGo(n) || nodes_[n].expected > cycle_ || isPutOff(n)) return;
    Plan plan;
    if (!planNode(n, plan)) return;
    if (n != oldest_ && !isSafe(plan)) return;
    for (const std::uint32_t v : plan.reads) {
      if (v == kNone) continue;
      if (values_[v].main == kR4) plan.priority = std::max(plan.priority, r4Waiter);
      if (values_[v].main == kR5) plan.priority = std::max(plan.priority, r5Waiter);
    }
    addPlan(plan);
    if (graph_.nodes[n].a.kind != Source::Kind::ReadEither || plan.portB != address::kNop) return;
    // Through the other port too; the first that fits is taken.
    std::swap(plan.portA, plan.portB);
    plan.a = plan.b = Mux::B;
    addPlan(plan);
  }

  // Of those that wait for r4 or r5 the first few will do.
  void considerFirst(const std::vector<std::uint32_t>& queue) {
    int tried = 0;
    for (const std::uint32_t n : queue) {
      if (!mayGo(n) || (tried >= 4 && n != oldest_)) continue;
      if (n != oldest_ && !isAwaited(n)) continue;
      ++tried;
      consider(n, 0, 0);
    }
  }

  // Some operation waits for nothing else but this result.
  bool isAwaited(std::uint32_t n) const {
    const std::uint32_t v = graph_.nodes[n].target;
    if (v == kNone || graph_.nodes[n].form == Node::Form::Receive) return true;
    for (const std::uint32_t u : users(v))
      if (nodes_[u].waits <= 1) return true;
    return users(v).begin() == users(v).end();
  }

  // Whether the rest could still go in order, with the registers that there are,
  // if this operation went before its turn.
  bool isSafe(const Plan& plan) const {
    const Node& node = graph_.nodes[plan.node];
    if (node.target == kNone || values_[node.target].main != kNowhere) return true;
    if (!plan.choosesPlace && node.result == kNowhere) return true;
    if (isCounted_[node.target] == 0 &&
        (graph_.values[node.target].home == kNowhere || openHome(plan) != kNowhere))
      return true;
    for (const std::uint32_t v : plan.reads)
      if (v != kNone && isCounted_[v] != 0 && values_[v].reads == 1 && values_[v].updates == 0)
        return true;
    std::int16_t most = 0;
    for (std::uint32_t k = oldest_; k < plan.node; ++k) most = std::max(most, alive_[k]);
    return most < capacity_;
  }

  // The vectors that need registers after each operation, if what is left goes in order.
  void countAlive() {
    alive_.assign(nodes_.size() + 1, 0);
    isCounted_.assign(values_.size(), 0);
    lastUse_.assign(values_.size(), 0);
    std::vector<std::uint32_t> defined(values_.size(), 0);
    for (std::uint32_t n = 0; n < nodes_.size(); ++n) {
      const Node& node = graph_.nodes[n];
      for (const Source* s : {&node.a, &node.b})
        if (s->isValue()) lastUse_[s->number] = n;
      if (node.target == kNone) continue;
      lastUse_[node.target] = n;
      if (!isUpdateOf(node)) defined[node.target] = n;
    }
    for (std::uint32_t v = 0; v < values_.size(); ++v) {
      const Place home = graph_.values[v].home;
      if (home != kNowhere && ((isFileA(home) ? poolA_ : poolB_) & bit(home)) == 0) continue;
      // Those that pass from one operation to the next wait in accumulators.
      if (lastUse_[v] <= defined[v] + kNextTo) continue;
      isCounted_[v] = 1;
      ++alive_[defined[v]];
      --alive_[lastUse_[v]];
    }
    std::int16_t most = 0;
    for (std::size_t k = 1; k < alive_.size(); ++k) {
      alive_[k] = static_cast<std::int16_t>(alive_[k] + alive_[k - 1]);
      most = std::max(most, alive_[k]);
    }
    const int pool = __builtin_popcount(poolA_) + __builtin_popcount(poolB_);
    capacity_ = std::max(most, static_cast<std::int16_t>(pool));
  }
  void addAlive(std::uint32_t to, std::int16_t by) {
    for (std::uint32_t k = oldest_; k < to; ++k) alive_[k] = static_cast<std::int16_t>(alive_[k] + by);
  }

  // Another result waits for r4, and the one that is there is not used up soon.
  void evictR4(std::int32_t priority) {
    const std::uint32_t v = occupant_[kR4];
    if (v == kNone || !isReadable(kR4)) return;
    unsigned waiting = 0;
    bool unready = false;
    for (const std::uint32_t u : users(v)) {
      if (nodes_[u].done) continue;
      if (graph_.nodes[u].homecoming && nodes_[u].waits == 0) return;
      ++waiting;
      unready |= nodes_[u].waits != 0 || !inWindow(u);
    }
    if (waiting < 2 && !unready) return;
    Plan plan;
    if (!planCopy(v, true, kToA | kToB | kToNeither, kNone, priority + 1, plan)) return;
    if (waiting >= kManyReads && values_[v].rotations == 0) {
      // The file matters more than which instruction it is.
      const std::array<int, 3> cost = costs(plan);
      if (cost[0] < cost[1] && freeA_ != 0) plan.files = kToA;
      if (cost[1] < cost[0] && freeB_ != 0) plan.files = kToB;
    }
    addPlan(plan);
  }

  // Choice

  Free freeAfter(const Bundle& bundle, const Plan& extra) const {
    Free f{freeA_, freeB_, accumulators(), occupant_[kR4] == kNone, occupant_[kR5] == kNone};
    std::array<std::uint32_t, 8> seen{};
    unsigned count = 0;
    const auto look = [&](const Plan& plan) {
      for (const std::uint32_t v : plan.reads)
        if (v != kNone) seen[count++] = v;
      if (plan.relocates) addFree(f, values_[plan.value].main);
    };
    for (unsigned k = 0; k < bundle.count; ++k) look(*bundle.plans[k]);
    look(extra);
    for (unsigned k = 0; k < count; ++k) {
      const std::uint32_t v = seen[k];
      if (values_[v].updates != 0 || graph_.values[v].liveOut) continue;
      std::uint32_t times = 0;
      for (unsigned m = 0; m < count; ++m) times += seen[m] == v ? 1U : 0U;
      if (times < values_[v].reads) continue;
      addFree(f, values_[v].main);
      addFree(f, values_[v].copy);
    }
    return f;
  }
  void addFree(Free& f, Place p) const {
    if (p == kNowhere) return;
    if (isFileA(p)) f.a |= bit(p) & poolA_;
    if (isFileB(p)) f.b |= bit(p) & poolB_;
    if (isAccumulator(p)) f.accumulators |= 1U << (p - kR0);
    f.r4 |= p == kR4;
    f.r5 |= p == kR5;
  }

  // The home of the register that the plan's value is of, if nobody else is there.
  Place openHome(const Plan& plan) const {
    const Value& v = graph_.values[plan.node == kNone ? plan.value : graph_.nodes[plan.node].target];
    if (v.home == kNowhere || v.liveOut) return kNowhere;
    const std::uint32_t tenant = occupant_[v.home];
    const bool leaves = tenant != kNone && (tenant == plan.reads[0] || tenant == plan.reads[1]) &&
                        values_[tenant].reads == 1 && values_[tenant].updates == 0 &&
                        !graph_.values[tenant].liveOut;
    return tenant == kNone || leaves ? v.home : kNowhere;
  }

  std::uint8_t choices(const Plan& plan, const Free& f) const {
    if (!plan.choosesPlace) return plan.files;
    const Place home = openHome(plan);
    // A copy for an operation that cannot read the home goes elsewhere.
    const bool mayGoHome = home != kNowhere && (plan.files == 0 || (plan.files & fileOf(home)) != 0);
    if (mayGoHome && !plan.wantsAccumulator && freeRegisters() < kPlenty) return fileOf(home);
    const auto open = static_cast<std::uint8_t>((f.a != 0 ? kToA : 0) | (f.b != 0 ? kToB : 0) |
                                                (f.accumulators != 0 ? kToNeither : 0) |
                                                (home != kNowhere ? fileOf(home) : 0));
    return plan.files == 0 ? open : static_cast<std::uint8_t>(open & plan.files);
  }

  // May results go to `x` and `y`, one from each pipe?
  static bool mayBoth(const Plan& p, std::uint8_t x, const Plan& q, std::uint8_t y, const Free& f) {
    if (x == y && x != kToNeither) return false;
    if (x == kToNeither && y == kToNeither && p.choosesPlace && q.choosesPlace)
      return (f.accumulators & (f.accumulators - 1)) != 0;
    return true;
  }

  bool homeIsFree(const Bundle& bundle, const Plan& plan) const {
    if (plan.fixed == kNowhere || plan.node == kNone) return true;
    const std::uint32_t tenant = occupant_[plan.fixed];
    if (tenant == kNone) return true;
    const Node& node = graph_.nodes[plan.node];
    if (node.target == tenant || (node.homecoming && node.a.number == tenant)) return true;
    // The tenant dies in this instruction.
    std::uint32_t times = 0;
    const auto look = [&](const Plan& p) {
      for (const std::uint32_t v : p.reads) times += v == tenant ? 1U : 0U;
    };
    for (unsigned k = 0; k < bundle.count; ++k) look(*bundle.plans[k]);
    look(plan);
    return values_[tenant].updates == 0 && !graph_.values[tenant].liveOut &&
           times >= values_[tenant].reads;
  }

  static bool pipesFit(const Plan& p, const Plan& q) {
    const auto one = [](const Plan& x, const Plan& y) {  // x in the ADD pipe, y in the MUL pipe
      return (x.pipes & kAddPipe) != 0 && (y.pipes & kMulPipe) != 0 && !y.setsFlags;
    };
    return one(p, q) || one(q, p);
  }

  // Whether `copy` moves a vector that the other plan moves or updates too.
  bool moves(const Plan& copy, const Plan& other) const {
    if (copy.value == kNone) return false;
    return other.value == copy.value ||
           (other.node != kNone && graph_.nodes[other.node].target == copy.value);
  }

  bool fits(const Bundle& bundle, const Plan& plan) const {
    if (bundle.count != 0) {
      if (bundle.whole || plan.whole || (bundle.exclusive & plan.exclusive) != 0) return false;
      if (plan.pipes != 0 && bundle.alus == 2) return false;
      const bool receive = plan.takesR4 && plan.pipes == 0;
      if ((receive && bundle.small >= 0) || (bundle.receives && plan.small >= 0)) return false;
      if (plan.portA != address::kNop && bundle.portA != address::kNop && plan.portA != bundle.portA)
        return false;
      // The code of 128.0 is the number of no register.
      const bool usesB = plan.small >= 0 || plan.portB != address::kNop;
      const bool isUsedB = bundle.small >= 0 || bundle.portB != address::kNop;
      if (usesB && isUsedB && (plan.portB != bundle.portB || plan.small != bundle.small))
        return false;
      for (unsigned k = 0; k < bundle.count; ++k) {
        if (plan.node != kNone && plan.node == bundle.plans[k]->node) return false;
        if (moves(plan, *bundle.plans[k]) || moves(*bundle.plans[k], plan)) return false;
      }
    }
    if (!homeIsFree(bundle, plan)) return false;
    const Free f = freeAfter(bundle, plan);
    if ((plan.takesR4 && !f.r4) || (plan.takesR5 && !f.r5)) return false;
    if (plan.pipes == 0 && !plan.whole) return true;
    const Plan* other = nullptr;
    for (unsigned k = 0; k < bundle.count; ++k)
      if (bundle.plans[k]->pipes != 0) other = bundle.plans[k];
    const std::uint8_t mine = choices(plan, f);
    if (mine == 0) return false;
    if (plan.wantsAccumulator && !desperate_) {
      const bool both = other != nullptr && other->wantsAccumulator;
      const std::uint32_t rest = both ? f.accumulators & (f.accumulators - 1) : f.accumulators;
      if (rest == 0) return false;
    }
    if (other == nullptr) return true;
    if (!pipesFit(plan, *other)) return false;
    const std::uint8_t theirs = choices(*other, f);
    for (std::uint8_t x = 1; x <= 4; x = static_cast<std::uint8_t>(x * 2))
      for (std::uint8_t y = 1; y <= 4; y = static_cast<std::uint8_t>(y * 2))
        if ((mine & x) != 0 && (theirs & y) != 0 && mayBoth(plan, x, *other, y, f)) return true;
    return false;
  }

  static void add(Bundle& bundle, const Plan& plan) {
    bundle.plans[bundle.count++] = &plan;
    if (plan.pipes != 0) ++bundle.alus;
    if (plan.portA != address::kNop) bundle.portA = plan.portA;
    if (plan.portB != address::kNop) bundle.portB = plan.portB;
    if (plan.small >= 0) bundle.small = plan.small;
    bundle.exclusive |= plan.exclusive;
    bundle.receives |= plan.takesR4 && plan.pipes == 0;
    bundle.whole |= plan.whole;
  }

  Bundle fill(std::size_t first) {
    Bundle bundle;
    if (!fits(bundle, plans_[first])) return bundle;
    add(bundle, plans_[first]);
    if (!options_.pair) return bundle;
    for (std::size_t k = 0; k < plans_.size(); ++k) {
      if (k == first || bundle.count == bundle.plans.size()) continue;
      if (fits(bundle, plans_[k])) add(bundle, plans_[k]);
    }
    if (bundle.alus < 2) addFollower(bundle);
    return bundle;
  }

  // An operation that overwrites what those of the bundle read may join them.
  void addFollower(Bundle& bundle) {
    const unsigned before = bundle.count;
    for (unsigned k = 0; k < before && bundle.count < bundle.plans.size(); ++k) {
      const std::uint32_t n = bundle.plans[k]->node;
      if (n == kNone) continue;
      for (std::uint32_t e = graph_.firstEdge[n]; e < graph_.firstEdge[n + 1]; ++e) {
        const Edge& edge = graph_.edges[e];
        if (edge.latency != 0 || nodes_[edge.to].waits != 1 || !mayGo(edge.to)) continue;
        Plan plan;
        const std::size_t requests = requests_.size();
        const bool can = planNode(edge.to, plan);
        requests_.resize(std::min(requests, requests_.size()));
        if (!can || !fits(bundle, plan) || followers_ == kFollowers) continue;
        follower_[followers_] = plan;
        add(bundle, follower_[followers_++]);
        if (bundle.alus == 2 || bundle.count == bundle.plans.size()) return;
      }
    }
  }

  Bundle choose() {
    Bundle best;
    int bestScore = -1;
    followers_ = 0;
    const std::size_t starts = std::min<std::size_t>(plans_.size(), kStarts);
    const bool hurry = !plans_.empty() && plans_.front().priority >= workLeft();
    for (std::size_t k = 0; k < starts; ++k) {
      const Bundle bundle = fill(k);
      if (bundle.count == 0) continue;
      const int score = scoreOf(bundle);
      if (score > bestScore) {
        best = bundle;
        bestScore = score;
      }
      if (score == kBestScore || hurry || !options_.pair || options_.window == 1) break;
    }
    for (std::size_t k = starts; k < plans_.size() && best.count == 0; ++k) best = fill(k);
    if (best.count == 0) {
      desperate_ = true;
      for (std::size_t k = 0; k < plans_.size() && best.count == 0; ++k) best = fill(k);
      desperate_ = false;
    }
    if (best.alus == 1 && options_.pair) vacateR5(best);
    return best;
  }

  // Two operations are better than one, and the pipe that has more left to do
  // should do what the other cannot.
  static constexpr int kBestScore = 3;
  int scoreOf(const Bundle& bundle) const {
    const std::uint8_t scarce = mulLeft_ > addLeft_ ? kMulPipe : kAddPipe;
    bool uses = false;
    for (unsigned k = 0; k < bundle.count; ++k) uses |= bundle.plans[k]->pipes == scarce;
    return (bundle.alus == 2 ? 2 : 0) + (uses ? 1 : 0);
  }

  // A vector in r5 that only the ADD pipe reads would keep the MUL pipe from the
  // next broadcast; where the MUL pipe is idle anyway, it is moved on.
  void vacateR5(Bundle& bundle) {
    const std::uint32_t v = occupant_[kR5];
    if (v == kNone || !isReadable(kR5) || forR5_.empty() || isPinned(v) || followers_ == kFollowers ||
        bundle.count == bundle.plans.size())
      return;
    for (unsigned k = 0; k < bundle.count; ++k)
      if (bundle.plans[k]->pipes != kAddPipe && bundle.plans[k]->pipes != 0) return;
    unsigned waiting = 0;
    for (const std::uint32_t u : users(v)) {
      if (nodes_[u].done) continue;
      if (graph_.nodes[u].pipes != kAddPipe) return;
      ++waiting;
    }
    if (waiting < 3) return;
    Plan& plan = follower_[followers_];
    plan = Plan();
    if (!planCopy(v, true, kToA | kToB | kToNeither, kNone, 0, plan) || !fits(bundle, plan)) return;
    ++followers_;
    add(bundle, plan);
  }
  std::int32_t workLeft() const {
    return std::max({addLeft_, mulLeft_, (addLeft_ + mulLeft_ + eitherLeft_ + 1) / 2});
  }

  // Nothing can go without waiting: what the QPU itself waits for, or room.
  Bundle chooseEarly() {
    plans_.clear();
    Bundle bundle;
    for (auto* queue : {&forR4_, &ready_}) {
      for (const std::uint32_t n : *queue) {
        const Node& node = graph_.nodes[n];
        const bool stalls = node.form == Node::Form::Receive || node.form == Node::Form::Wait;
        Plan plan;
        if (!stalls || !mayGo(n) || (isPutOff(n) && (idle_ < kIdleBeforeReceiving || isInGap())) || !planNode(n, plan))
          continue;
        addPlan(plan);
      }
    }
    for (std::size_t k = 0; k < plans_.size() && bundle.count == 0; ++k)
      if (fits(bundle, plans_[k])) add(bundle, plans_[k]);
    if (bundle.count != 0 || idle_ < kIdleBeforeEviction) return bundle;
    plans_.clear();
    for (const Place p : {kR5, kR4}) {
      const std::uint32_t v = occupant_[p];
      Plan plan;
      if (v != kNone && !isPinned(v) && planCopy(v, true, kToA | kToB | kToNeither, kNone, 0, plan))
        addPlan(plan);
    }
    takeFirst(bundle);
    if (bundle.count != 0) return bundle;
    // Vectors that leave the block for their homes, where they take nobody's room.
    plans_.clear();
    for (const std::uint32_t n : ready_) {
      Plan plan;
      if (graph_.nodes[n].homecoming && nodes_[n].earliest <= cycle_ && planNode(n, plan)) addPlan(plan);
    }
    takeFirst(bundle);
    return bundle;
  }
  void takeFirst(Bundle& bundle) const {
    for (std::size_t k = 0; k < plans_.size() && bundle.count == 0; ++k)
      if (fits(bundle, plans_[k])) add(bundle, plans_[k]);
  }

  // Results

  bool isShortLived(std::uint32_t v) const {
    unsigned open = 0;
    for (const std::uint32_t u : users(v)) {
      if (nodes_[u].done) continue;
      if (++open > 3 || nodes_[u].waits > 1 ||
          (!inWindow(u) && u >= oldest_ + kNear))
        return false;
    }
    return true;
  }

  // What speaks against a vector in file A, in file B and in an accumulator.
  std::array<int, 3> costs(const Plan& plan) const {
    const std::uint32_t v = plan.node == kNone ? plan.value : graph_.nodes[plan.node].target;
    std::array<int, 3> cost{2, 2, 9};
    const Value& value = graph_.values[v];
    if (plan.node == kNone && plan.copyFor != kNone) cost[2] = 0;
    if (values_[v].rotations != 0) cost[2] = -10;
    else if (value.updates == 0 && isShortLived(v)) cost[2] = 0;
    unsigned looked = 0;
    for (const std::uint32_t u : users(v)) {
      if (nodes_[u].done) continue;
      if (++looked > 4) break;
      const Node& node = graph_.nodes[u];
      for (const Source* s : {&node.a, &node.b}) {
        if (s->kind == Source::Kind::Small) cost[1] += 4;
        if (!s->isValue() || s->number == v || values_[s->number].copy != kNowhere) continue;
        const Place p = values_[s->number].main;
        if (p == kNowhere) continue;
        if (isFileA(p)) cost[0] += 4;
        if (isFileB(p)) cost[1] += 4;
      }
      if (node.quadSource) cost[1] += 4;
    }
    // An instruction reads one of each file, so what the MUL pipe reads from one
    // should have a partner that the ADD pipe reads from the other.
    std::array<int, 2> wanted{};
    for (std::size_t file = 0; file < 2; ++file) {
      if (values_[v].byPipe[1] != 0) wanted[file] += toRead_[0][1 - file] - toRead_[1][file];
      if (values_[v].byPipe[0] != 0) wanted[file] += toRead_[1][1 - file] - toRead_[0][file];
    }
    if (wanted[0] < wanted[1]) cost[0] += 2;
    if (wanted[1] < wanted[0]) cost[1] += 2;
    // What comes one after the other is often used so.
    if (options_.takeTurns && isFile(lastRead_) && plan.node != kNone &&
        graph_.nodes[plan.node].a.kind == Source::Kind::ReadEither)
      cost[isFileA(lastRead_) ? 0 : 1] += kTurnCost;
    const int a = __builtin_popcount(freeA_);
    const int b = __builtin_popcount(freeB_);
    if (a < b) ++cost[0];
    if (b < a) ++cost[1];
    // A home costs no register.
    const Place home = openHome(plan);
    if (home != kNowhere && a + b < kPlenty) cost[isFileA(home) ? 0 : 1] -= 6;
    return cost;
  }

  static std::size_t indexOf(std::uint8_t file) { return file == kToA ? 0 : file == kToB ? 1 : 2; }

  // Files for the results of one or two operations, the cheapest that may be.
  std::array<std::uint8_t, 2> chooseFiles(const std::array<const Plan*, 2>& alus, const Free& f) const {
    std::array<std::array<int, 3>, 2> cost{};
    std::array<std::uint8_t, 2> open{};
    for (std::size_t k = 0; k < 2; ++k) {
      if (alus[k] == nullptr) continue;
      open[k] = choices(*alus[k], f);
      if (alus[k]->choosesPlace) cost[k] = costs(*alus[k]);
    }
    std::array<std::uint8_t, 2> best{};
    int least = INT32_MAX;
    for (std::uint8_t x = 1; x <= 4; x = static_cast<std::uint8_t>(x * 2)) {
      if ((open[0] & x) == 0) continue;
      if (alus[1] == nullptr) {
        if (cost[0][indexOf(x)] < least) {
          least = cost[0][indexOf(x)];
          best = {x, 0};
        }
        continue;
      }
      for (std::uint8_t y = 1; y <= 4; y = static_cast<std::uint8_t>(y * 2)) {
        if ((open[1] & y) == 0 || !mayBoth(*alus[0], x, *alus[1], y, f)) continue;
        const int sum = cost[0][indexOf(x)] + cost[1][indexOf(y)];
        if (sum < least) {
          least = sum;
          best = {x, y};
        }
      }
    }
    return best;
  }

  Place take(std::uint8_t file, const Plan& plan) {
    if (file == kToNeither) {
      for (Place p = kR0; p < kR4; ++p)
        if (occupant_[p] == kNone) return p;
      for (Place p = kR0; p < kR4; ++p) {
        if (!isDroppable(p)) continue;
        values_[occupant_[p]].copy = kNowhere;
        freePlace(p);
        return p;
      }
      return kNowhere;
    }
    const std::uint32_t mask = file == kToA ? freeA_ : freeB_;
    // Rather the home of its register, which no other value may take.
    const Value& v = graph_.values[plan.node == kNone ? plan.value : graph_.nodes[plan.node].target];
    if (v.home != kNowhere && !v.liveOut && fileOf(v.home) == file && occupant_[v.home] == kNone)
      return v.home;
    return static_cast<Place>((file == kToA ? 0 : kFileB) + __builtin_ctz(mask));
  }

  void commit(const Bundle& bundle) {
    Slot slot;
    result_.lastWritten = 0;
    if (bundle.count != 0) {
      write(bundle, slot);
      for (unsigned k = 0; k < bundle.count; ++k)
        if (bundle.plans[k]->node != kNone) finish(bundle.plans[k]->node);
    }
    result_.slots.push_back(slot);
  }

  void write(const Bundle& bundle, Slot& slot) {
    isa::Instruction& i = slot.instruction;
    std::array<const Plan*, 2> alus{};
    unsigned n = 0;
    std::uint32_t first = kNone;
    for (unsigned k = 0; k < bundle.count; ++k) {
      const Plan& plan = *bundle.plans[k];
      if (plan.pipes != 0 || plan.whole) alus[n++] = &plan;
      if (plan.node != kNone && plan.node < first &&
          graph_.nodes[plan.node].site != code::Object::kNoSite) {
        first = plan.node;
        slot.site = graph_.nodes[first].site;
      }
      if (plan.portA != address::kNop) i.raddrA = plan.portA;
      if (plan.portB != address::kNop) i.raddrB = plan.portB;
      if (plan.small >= 0) i.signal = Signal::SmallImmediate;
    }
    // The first of the two in the ADD pipe.
    if (n == 2) {
      const auto asIs = [](const Plan& x, const Plan& y) {
        return (x.pipes & kAddPipe) != 0 && (y.pipes & kMulPipe) != 0 && !y.setsFlags;
      };
      const bool can = asIs(*alus[0], *alus[1]);
      const bool canSwapped = asIs(*alus[1], *alus[0]);
      if (!can && canSwapped) std::swap(alus[0], alus[1]);
    }
    const Plan none;
    Free f = freeAfter(bundle, none);
    std::array<std::uint8_t, 2> files{};
    if (n != 0) files = chooseFiles(alus, f);
    // Vectors that die leave their places before the results take theirs.
    for (unsigned k = 0; k < bundle.count; ++k) die(*bundle.plans[k]);
    std::array<bool, 2> inAdd{true, false};
    if (n == 1) inAdd[0] = alus[0]->whole || (alus[0]->pipes & kAddPipe) != 0;
    for (unsigned k = 0; k < n; ++k) {
      const std::uint8_t target = place(*alus[k], files[k]);
      writePipe(i, *alus[k], inAdd[k], target);
      if (files[k] == (inAdd[k] ? kToB : kToA)) i.swap = true;
    }
    for (unsigned k = 0; k < bundle.count; ++k) {
      const Plan& plan = *bundle.plans[k];
      if (plan.node == kNone) continue;
      const Node& node = graph_.nodes[plan.node];
      if (node.form == Node::Form::Receive) {
        i.signal = node.unit == 0 ? Signal::LoadTmu0 : Signal::LoadTmu1;
        if (isNeeded(node.target)) settle(node.target, kR4, 1);
      }
    }
  }

  void die(const Plan& plan) {
    if (plan.node != kNone) {
      const Node& node = graph_.nodes[plan.node];
      for (const std::uint32_t v : plan.reads) {
        if (v == kNone) continue;
        --values_[v].reads;
        for (std::size_t pipe = 0; pipe < 2; ++pipe) {
          if (!readsInPipe(node, pipe)) continue;
          --values_[v].byPipe[pipe];
          const Place p = countedAt(v);
          if (isFile(p)) --toRead_[pipe][isFileA(p) ? 0 : 1];
        }
        if (node.rotate != 0 && !node.quadSource && v == node.a.number) --values_[v].rotations;
        if (isDead(v)) release(v);
      }
    }
    if (plan.relocates) {
      countReads(plan.value, countedAt(plan.value), -1);
      freePlace(values_[plan.value].main);
      freePlace(values_[plan.value].copy);
      values_[plan.value].main = values_[plan.value].copy = kNowhere;
      countReads(plan.value, countedAt(plan.value), 1);
    }
  }

  void settle(std::uint32_t v, Place p, int latency) {
    countReads(v, countedAt(v), -1);
    occupy(p, v);
    values_[v].main = p;
    readableAt_[p] = cycle_ + latency;
  }

  // Decides where the result goes; the address that is written.
  std::uint8_t place(const Plan& plan, std::uint8_t file) {
    Place p = plan.fixed;
    std::uint32_t v = plan.value;
    if (plan.node != kNone && !graph_.nodes[plan.node].homecoming) {
      const Node& node = graph_.nodes[plan.node];
      v = node.target;
      if (node.result == kR4) {
        if (isNeeded(v)) settle(v, kR4, kSfuLatency);
        return node.address;
      }
      if (node.result == kR5) {
        if (isNeeded(v)) settle(v, kR5, 1);
        return node.address;
      }
      if (node.address != address::kNop) return node.address;
      if (p == kNowhere && !plan.choosesPlace) return address::kNop;
    }
    if (plan.node == kNone && isDead(v)) return address::kNop;
    if (plan.choosesPlace) p = take(file, plan);
    if (plan.node != kNone && graph_.nodes[plan.node].a.kind == Source::Kind::ReadEither)
      lastRead_ = p;
    const bool isCopy = plan.node == kNone && !plan.relocates;
    if (isCopy) {
      if (values_[v].copy != kNowhere) freePlace(values_[v].copy);
      occupy(p, v);
      values_[v].copy = p;
      values_[v].copyFor = plan.copyFor;
    } else {
      // An update leaves no old copy behind.
      if (values_[v].copy != kNowhere) {
        freePlace(values_[v].copy);
        values_[v].copy = kNowhere;
      }
      occupy(p, v);
      countReads(v, countedAt(v), -1);
      values_[v].main = p;
      countReads(v, p, 1);
      values_[v].copyFor = plan.node == kNone ? plan.copyFor : kNone;
    }
    // Of a register with a home, but somewhere else.
    if (!isCopy && isFile(p) && isCounted_[v] == 0 && p != graph_.values[v].home) {
      isCounted_[v] = 1;
      addAlive(lastUse_[v], 1);
    }
    readableAt_[p] = cycle_ + (isFile(p) ? 2 : 1);
    if (isFile(p)) result_.lastWritten |= std::uint64_t{1} << p;
    return isAccumulator(p) ? static_cast<std::uint8_t>(address::kR0 + (p - kR0))
                            : static_cast<std::uint8_t>(p % kFileB);
  }

  void writePipe(isa::Instruction& i, const Plan& plan, bool inAdd, std::uint8_t target) const {
    isa::Cond cond = isa::Cond::Always;
    isa::AddOp addOp = isa::AddOp::Or;
    isa::MulOp mulOp = isa::MulOp::V8Min;
    if (plan.node != kNone) {
      const Node& node = graph_.nodes[plan.node];
      switch (node.form) {
        case Node::Form::Load: i.form = isa::Form::LoadImmediate; break;
        case Node::Form::LoadSigned: i.form = isa::Form::LoadPerElementSigned; break;
        case Node::Form::LoadUnsigned: i.form = isa::Form::LoadPerElementUnsigned; break;
        case Node::Form::Semaphore:
          i.form = isa::Form::Semaphore;
          i.immediate = node.constant;
          return;
        default: break;
      }
      if (plan.whole) i.immediate = node.constant;
      cond = node.cond;
      addOp = node.add;
      mulOp = node.mul;
      i.setFlags |= node.setsFlags;
    }
    if (plan.whole) {
      i.condAdd = cond;
      i.waddrAdd = target;
    } else if (inAdd) {
      i.opAdd = addOp;
      i.condAdd = cond;
      i.waddrAdd = target;
      i.addA = plan.a;
      i.addB = plan.b;
    } else {
      i.opMul = mulOp;
      i.condMul = cond;
      i.waddrMul = target;
      i.mulA = plan.a;
      i.mulB = plan.b;
    }
  }

  void finish(std::uint32_t n) {
    const Node& node = graph_.nodes[n];
    takeReady(n);
    nodes_[n].done = true;
    --left_;
    if (!needsReceive_[n]) --independentLeft_;
    if (node.form == Node::Form::Receive) {
      --receivesLeft_;
      gapEnds_ = cycle_ + kReceiveGap;
    }
    count(node, -1);
    if (node.target != kNone && isCounted_[node.target] != 0 && !isUpdateOf(node) &&
        isNeeded(node.target))
      addAlive(n, 1);
    if (node.target != kNone && values_[node.target].updates != 0 && isUpdateOf(node)) {
      --values_[node.target].updates;
      if (isDead(node.target)) release(node.target);
    }
    if (node.setsFlags) result_.flagsAt = cycle_;
    if (node.address == address::kTmuNoSwap) result_.settles = cycle_ + kNoSwapLatency;
    if (node.address == address::kVpmSetup && node.files == kToA)
      result_.settles = std::max(result_.settles, cycle_ + kVpmReadLatency);
    for (std::uint32_t e = graph_.firstEdge[n]; e < graph_.firstEdge[n + 1]; ++e) {
      const Edge& edge = graph_.edges[e];
      NodeState& to = nodes_[edge.to];
      const Node::Form form = graph_.nodes[edge.to].form;
      const bool stalls = form == Node::Form::Receive || form == Node::Form::Wait;
      to.earliest = std::max(to.earliest, cycle_ + (stalls ? std::min(edge.latency, 1) : edge.latency));
      to.expected = std::max(to.expected, cycle_ + edge.latency);
      if (--to.waits == 0) makeReady(edge.to);
    }
  }

  // Whether the node writes a value that was there before.
  static bool isUpdateOf(const Node& node) {
    return node.cond != isa::Cond::Always && node.address == address::kNop;
  }

  const Graph& graph_;
  const ScheduleOptions& options_;
  std::vector<NodeState> nodes_;
  std::vector<ValueState> values_;
  std::array<std::uint32_t, kPlaces> occupant_{};   // value in each place
  std::array<std::int32_t, kPlaces> readableAt_{};
  std::uint32_t poolA_ = 0, poolB_ = 0;             // registers for any value of the block
  std::uint32_t freeA_ = 0, freeB_ = 0;
  std::vector<std::uint32_t> ready_, forR5_, forR4_;  // by height
  std::vector<Plan> plans_;
  std::vector<Request> requests_;
  static constexpr std::size_t kFollowers = 8;
  std::array<Plan, kFollowers> follower_;
  std::size_t followers_ = 0;
  std::vector<std::int16_t> alive_;                 // after each operation, see countAlive
  std::vector<char> isCounted_;                     // values
  std::vector<std::uint32_t> lastUse_;              // of each value, an operation
  std::int16_t capacity_ = 0;
  // By ADD and MUL pipe, from files A and B.
  std::array<std::array<int, 2>, 2> toRead_{};
  Place lastRead_ = kNowhere;  // of what an I/O address gave
  std::uint32_t oldest_ = 0;
  std::uint32_t firstRequest_ = 0;                  // that is left; an upper bound of those before it
  std::vector<bool> needsReceive_;                  // by operation
  std::uint32_t independentLeft_ = 0;               // operations that need no receive
  std::uint32_t receivesLeft_ = 0;
  std::int32_t gapEnds_ = 0;                        // the first instruction that the last receive may be in
  std::uint32_t left_ = 0;
  std::int32_t addLeft_ = 0, mulLeft_ = 0, eitherLeft_ = 0;
  std::int32_t cycle_ = 0;
  int idle_ = 0;
  bool desperate_ = false;  // vectors that should be in accumulators may go elsewhere
  ScheduledBlock result_;
};

}  // namespace

std::optional<ScheduledBlock> schedule(const Graph& graph, const ScheduleOptions& options) {
  return Scheduler(graph, options).run();
}

}  // namespace qpu::compiler
