#include "compiler/schedule_copies.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

constexpr int kMostRequests = 3;
constexpr unsigned kManyReads = 3;
constexpr std::uint8_t kAnywhere = kToA | kToB | kToNeither;

}  // namespace

void CopyPlanner::addRequested() {
  int count = 0;
  for (const CopyRequest& r : planner_.requests()) {
    if (++count > kMostRequests) break;
    const ValueState& value = state_.values[r.value];
    if (value.copy != kNowhere) {
      if (state_.isHeld(r.value)) continue;
      state_.dropCopy(r.value);
    }
    const bool hasFile = ((r.allowed & kToA) != 0 && state_.freeA != 0) ||
                         ((r.allowed & kToB) != 0 && state_.freeB != 0);
    if (!hasFile && state_.availableAccumulators() == 0) {
      evictAccumulator(r);
      continue;
    }
    Candidate candidate;
    const bool relocates = value.main >= kR4 && !state_.isPinned(r.value);
    if (planner_.planCopy(r.value, relocates, r.allowed, r.node, r.priority, candidate)) candidates_.add(candidate);
  }
}

// Frees an accumulator so that a requested copy can be placed there.
void CopyPlanner::evictAccumulator(const CopyRequest& request) {
  std::uint32_t victim = kNone;
  std::int32_t least = INT32_MAX;
  for (Place p = kR0; p < kR4; ++p) {
    const std::uint32_t v = state_.occupant[p];
    if (v == kNone || v == request.value) continue;
    const bool isHeld = state_.isHeld(v);
    if (state_.values[v].copy == p && !isHeld) {
      state_.dropCopy(v);
      return;
    }
    if (isHeld || (state_.idle == 0 && state_.values[v].rotations == 0 && state_.isShortLived(v))) continue;
    std::int32_t urgency = 0;
    for (const std::uint32_t u : state_.users(v))
      if (!state_.nodes[u].done && state_.nodes[u].pendingEdges == 0)
        urgency = std::max(urgency, state_.graph.nodes[u].height);
    if (urgency < least) {
      least = urgency;
      victim = v;
    }
  }
  Candidate candidate;
  if (victim != kNone && planner_.planCopy(victim, true, kToA | kToB, kNone, request.priority, candidate))
    candidates_.add(candidate);
}

void CopyPlanner::evictR4(std::int32_t priority) {
  const std::uint32_t v = state_.occupant[kR4];
  if (v == kNone || !state_.isReadable(kR4)) return;
  unsigned waiting = 0;
  bool isUnready = false;
  for (const std::uint32_t u : state_.users(v)) {
    if (state_.nodes[u].done) continue;
    if (state_.graph.nodes[u].isLiveOutCopy && state_.nodes[u].pendingEdges == 0) return;
    ++waiting;
    isUnready |= state_.nodes[u].pendingEdges != 0 || !state_.isInWindow(u);
  }
  if (waiting < 2 && !isUnready) return;
  Candidate candidate;
  if (!planner_.planCopy(v, true, kAnywhere, kNone, priority + 1, candidate)) return;
  if (waiting >= kManyReads && state_.values[v].rotations == 0) {
    // Moving the value to the right file is more important than moving it early.
    const std::array<int, 3> cost = files_.costs(candidate);
    if (cost[0] < cost[1] && state_.freeA != 0) candidate.files = kToA;
    if (cost[1] < cost[0] && state_.freeB != 0) candidate.files = kToB;
  }
  candidates_.add(candidate);
}

void CopyPlanner::evictR4AndR5() {
  for (const Place p : {kR5, kR4}) {
    const std::uint32_t v = state_.occupant[p];
    Candidate candidate;
    if (v != kNone && !state_.isPinned(v) && planner_.planCopy(v, true, kAnywhere, kNone, 0, candidate))
      candidates_.add(candidate);
  }
}

bool CopyPlanner::planVacateR5(Candidate& candidate) const {
  const std::uint32_t v = state_.occupant[kR5];
  if (v == kNone || !state_.isReadable(kR5) || state_.ready.forR5().empty() || state_.isPinned(v)) return false;
  unsigned waiting = 0;
  for (const std::uint32_t u : state_.users(v)) {
    if (state_.nodes[u].done) continue;
    if (state_.graph.nodes[u].pipes != kAddPipe) return false;
    ++waiting;
  }
  return waiting >= kManyReads && planner_.planCopy(v, true, kAnywhere, kNone, 0, candidate);
}

}  // namespace qpu::compiler
