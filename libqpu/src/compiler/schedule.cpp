#include "compiler/schedule.hpp"

#include <algorithm>

#include "compiler/schedule_bundle.hpp"
#include "compiler/schedule_receives.hpp"
#include "compiler/schedule_write.hpp"

namespace qpu::compiler {
namespace {

namespace address = isa::address;

// Maximum number of ready operations that are examined for one instruction.
constexpr std::size_t kMostScanned = 40;
constexpr std::size_t kMostCandidates = 16;  // maximum number of examined operations that can issue
constexpr int kMostFixed = 4;                // maximum number of operations that write r4 or r5
// Maximum number of consecutive empty instructions. If more are needed, scheduling fails.
constexpr int kMaxIdle = 16;
constexpr int kIdleBeforeEviction = 3;
// The maximum number of instructions by which the latency of a register file may delay TMU
// requests.
constexpr int kIdleBeforeReceive = 2;

class ListScheduler {
 public:
  ListScheduler(const Graph& graph, const ScheduleOptions& options)
      : graph_(graph), state_(graph, options), receives_(state_), planner_(state_), files_(state_),
        copies_(state_, planner_, files_, candidates_), bundler_(state_, planner_, files_, copies_, candidates_),
        writer_(state_, files_) {}

  std::optional<ScheduledBlock> run() {
    while (state_.remaining > 0) {
      while (state_.oldest < graph_.nodes.size() && state_.nodes[state_.oldest].done) ++state_.oldest;
      gather();
      Bundle bundle = bundler_.choose();
      if (bundle.count == 0) bundle = chooseWithStall();
      if (bundle.count != 0)
        state_.idle = 0;
      else if (++state_.idle > kMaxIdle)
        return std::nullopt;
      result_.slots.push_back(writer_.write(bundle));
      for (const Candidate* candidate : bundle)
        if (!candidate->isCopy()) issue(candidate->node);
      ++state_.cycle;
    }
    result_.lastWritten = writer_.lastWritten();
    return std::move(result_);
  }

 private:
  // Collects the operations and copies that can issue without a stall in the current cycle.
  void gather() {
    candidates_.clear();
    planner_.clearRequests();
    const std::int32_t heightForR5 = firstHeight(state_.ready.forR5());
    const std::int32_t heightForR4 = firstHeight(state_.ready.forR4());
    std::size_t scanned = 0;
    bool sawOldest = false;
    for (const std::uint32_t n : state_.ready.others()) {
      if (++scanned > kMostScanned || candidates_.size() >= kMostCandidates) break;
      sawOldest |= n == state_.oldest;
      consider(n, heightForR4, heightForR5);
    }
    if (!sawOldest && state_.oldest < graph_.nodes.size() && state_.nodes[state_.oldest].pendingEdges == 0 &&
        graph_.nodes[state_.oldest].result == kNowhere)
      consider(state_.oldest, heightForR4, heightForR5);
    considerFixed(state_.ready.forR5());
    considerFixed(state_.ready.forR4());
    if (heightForR4 > 0) copies_.evictR4(heightForR4);
    copies_.addRequested();
  }

  std::int32_t firstHeight(const std::vector<std::uint32_t>& ready) const {
    for (const std::uint32_t n : ready)
      if (state_.canIssueWithoutStall(n)) return graph_.nodes[n].height;
    return 0;
  }

  void consider(std::uint32_t n, std::int32_t heightForR4, std::int32_t heightForR5) {
    if (!state_.canIssueWithoutStall(n) || receives_.isDelayed(n)) return;
    Candidate candidate;
    if (!planner_.planNode(n, candidate)) return;
    if (n != state_.oldest && !fitsOutOfOrder(candidate)) return;
    // An operation that frees r4 or r5 is as urgent as the operations that are waiting for this
    // register.
    for (const std::uint32_t v : candidate.reads) {
      if (v == kNone) continue;
      if (state_.values[v].main == kR4) candidate.priority = std::max(candidate.priority, heightForR4);
      if (state_.values[v].main == kR5) candidate.priority = std::max(candidate.priority, heightForR5);
    }
    candidates_.add(candidate);
    if (graph_.nodes[n].a.kind != Source::Kind::ReadEither || candidate.portB != address::kNop) return;
    // Also add the variant that uses the other read port. The bundler chooses the variant that
    // fits.
    std::swap(candidate.portA, candidate.portB);
    candidate.a = candidate.b = isa::Mux::B;
    candidates_.add(candidate);
  }

  // Adds candidates for the first few operations that write r4 or r5.
  void considerFixed(const std::vector<std::uint32_t>& ready) {
    int tried = 0;
    for (const std::uint32_t n : ready) {
      const bool isOldest = n == state_.oldest;
      if (!state_.canIssue(n) || (tried >= kMostFixed && !isOldest)) continue;
      if (!isOldest && !isAwaited(n)) continue;
      ++tried;
      consider(n, 0, 0);
    }
  }

  // Returns true if an operation is waiting only for the result of operation n.
  bool isAwaited(std::uint32_t n) const {
    const std::uint32_t v = graph_.nodes[n].target;
    if (v == kNone || graph_.nodes[n].form == Node::Form::Receive) return true;
    const Users users = state_.users(v);
    return users.begin() == users.end() ||
           std::any_of(users.begin(), users.end(),
                       [this](std::uint32_t u) { return state_.nodes[u].pendingEdges <= 1; });
  }

  // Returns true if the remaining operations, in source order, still fit into the registers after
  // this candidate has issued.
  bool fitsOutOfOrder(const Candidate& candidate) const {
    const Node& node = graph_.nodes[candidate.node];
    const std::uint32_t v = node.target;
    if (v == kNone || state_.values[v].main != kNowhere) return true;
    if (!candidate.choosesPlace && node.result == kNowhere) return true;
    if (!state_.pressure.isCounted(v) &&
        (graph_.values[v].home == kNowhere || files_.openHome(candidate) != kNowhere))
      return true;
    for (const std::uint32_t read : candidate.reads)
      if (read != kNone && state_.pressure.isCounted(read) && state_.values[read].reads == 1 &&
          state_.values[read].updates == 0)
        return true;
    return state_.pressure.hasRoom(state_.oldest, candidate.node);
  }

  // Chooses an operation that stalls the QPU, or a copy that frees a register. The scheduler
  // calls this function if nothing can issue without a stall.
  Bundle chooseWithStall() {
    candidates_.clear();
    for (const auto* ready : {&state_.ready.forR4(), &state_.ready.waits()})
      for (const std::uint32_t n : *ready) {
        if (!graph_.nodes[n].canStall() || !state_.canIssue(n)) continue;
        if (receives_.isDelayed(n) && (state_.idle < kIdleBeforeReceive || receives_.isInGap())) continue;
        Candidate candidate;
        if (planner_.planNode(n, candidate)) candidates_.add(candidate);
      }
    Bundle bundle = bundler_.chooseFirst();
    if (bundle.count != 0 || state_.idle < kIdleBeforeEviction) return bundle;
    candidates_.clear();
    copies_.evictR4AndR5();
    bundle = bundler_.chooseFirst();
    if (bundle.count != 0) return bundle;
    // A live-out copy frees a register, because it moves a value to a home register, which no other
    // value can use.
    candidates_.clear();
    for (const std::uint32_t n : state_.ready.others()) {
      Candidate candidate;
      if (graph_.nodes[n].isLiveOutCopy && state_.nodes[n].earliest <= state_.cycle &&
          planner_.planNode(n, candidate))
        candidates_.add(candidate);
    }
    return bundler_.chooseFirst();
  }

  // Records that operation n issues in the current cycle.
  void issue(std::uint32_t n) {
    const Node& node = graph_.nodes[n];
    state_.ready.remove(n);
    state_.nodes[n].done = true;
    --state_.remaining;
    receives_.issue(n);
    state_.work.count(node, -1);
    if (node.target != kNone) define(n, node);
    if (node.setsFlags) result_.flagsAt = state_.cycle;
    if (node.address == address::kTmuNoSwap) result_.minimumLength = state_.cycle + kNoSwapLatency;
    if (node.address == address::kVpmSetup && node.files == kToA)
      result_.minimumLength = std::max(result_.minimumLength, state_.cycle + kVpmReadLatency);
    for (const Edge& edge : graph_.edgesOf(n)) {
      NodeState& to = state_.nodes[edge.to];
      const std::int32_t latency = graph_.nodes[edge.to].canStall() ? std::min(edge.latency, 1) : edge.latency;
      to.earliest = std::max(to.earliest, state_.cycle + latency);
      to.stallFree = std::max(to.stallFree, state_.cycle + edge.latency);
      if (--to.pendingEdges == 0) state_.ready.insert(edge.to);
    }
  }

  void define(std::uint32_t n, const Node& node) {
    const std::uint32_t v = node.target;
    if (!isConditionalWrite(node)) {
      if (state_.pressure.isCounted(v) && state_.isNeeded(v)) state_.pressure.define(n, state_.oldest);
      return;
    }
    if (state_.values[v].updates == 0) return;
    --state_.values[v].updates;
    if (!state_.isNeeded(v)) state_.release(v);
  }

  const Graph& graph_;
  BlockState state_;
  ReceiveTiming receives_;
  Planner planner_;
  FileChooser files_;
  CandidateList candidates_;
  CopyPlanner copies_;
  Bundler bundler_;
  InstructionWriter writer_;
  ScheduledBlock result_;
};

}  // namespace

std::optional<ScheduledBlock> schedule(const Graph& graph, const ScheduleOptions& options) {
  return ListScheduler(graph, options).run();
}

}  // namespace qpu::compiler
