#include "compiler/schedule_bundle.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

namespace address = isa::address;

constexpr std::size_t kStarts = 5;  // number of candidates that are tried as the first one in a bundle
constexpr int kBestScore = 3;

bool pipesFit(const Candidate& p, const Candidate& q) {
  return inAddAndMul(p, q) || inAddAndMul(q, p);
}

}  // namespace

Bundle Bundler::choose() {
  Bundle best;
  int bestScore = -1;
  followerCount_ = 0;
  const std::size_t starts = std::min<std::size_t>(candidates_.size(), kStarts);
  const bool isCritical = !candidates_.empty() && candidates_.front().priority >= state_.work.instructions();
  for (std::size_t k = 0; k < starts; ++k) {
    const Bundle bundle = fill(k);
    if (bundle.count == 0) continue;
    const int score = scoreOf(bundle);
    if (score > bestScore) {
      best = bundle;
      bestScore = score;
    }
    if (score == kBestScore || isCritical || !state_.options.pair || state_.options.window == 1) break;
  }
  for (std::size_t k = starts; k < candidates_.size() && best.count == 0; ++k) best = fill(k);
  if (best.count == 0) {
    ignoresPreference_ = true;
    for (std::size_t k = 0; k < candidates_.size() && best.count == 0; ++k) best = fill(k);
    ignoresPreference_ = false;
  }
  if (best.alus == 1 && state_.options.pair) vacateR5(best);
  return best;
}

Bundle Bundler::chooseFirst() const {
  Bundle bundle;
  for (std::size_t k = 0; k < candidates_.size() && bundle.count == 0; ++k)
    if (fits(bundle, candidates_[k])) bundle.add(candidates_[k]);
  return bundle;
}

bool Bundler::fits(const Bundle& bundle, const Candidate& candidate) const {
  return resourcesFit(bundle, candidate) && isTargetFree(bundle, candidate) && resultFits(bundle, candidate);
}

// Returns true if the pipes, units, ports and the small immediate that the candidate needs are
// available in the bundle.
bool Bundler::resourcesFit(const Bundle& bundle, const Candidate& candidate) const {
  if (bundle.count == 0) return true;
  if (bundle.isFull || candidate.fillsInstruction || (bundle.exclusive & candidate.exclusive) != 0) return false;
  if (candidate.pipes != 0 && bundle.alus == 2) return false;
  const bool receives = candidate.takesR4 && candidate.pipes == 0;
  if ((receives && bundle.small >= 0) || (bundle.receives && candidate.small >= 0)) return false;
  if (candidate.portA != address::kNop && bundle.portA != address::kNop && candidate.portA != bundle.portA)
    return false;
  // The code of the small immediate 128.0 is the same number as the address that means "no
  // register".
  const bool usesB = candidate.small >= 0 || candidate.portB != address::kNop;
  const bool isUsedB = bundle.small >= 0 || bundle.portB != address::kNop;
  if (usesB && isUsedB && (candidate.portB != bundle.portB || candidate.small != bundle.small)) return false;
  return std::none_of(bundle.begin(), bundle.end(), [&](const Candidate* other) {
    return (candidate.node != kNone && candidate.node == other->node) || moveSameValue(candidate, *other) ||
           moveSameValue(*other, candidate);
  });
}

// Returns true if `copy` moves a value that the other candidate also moves or updates.
bool Bundler::moveSameValue(const Candidate& copy, const Candidate& other) const {
  if (copy.value == kNone) return false;
  return other.value == copy.value ||
         (other.node != kNone && state_.graph.nodes[other.node].target == copy.value);
}

// Returns true if the register that the candidate must write is free, or if it holds a value
// whose last read is in this bundle.
bool Bundler::isTargetFree(const Bundle& bundle, const Candidate& candidate) const {
  if (candidate.fixed == kNowhere || candidate.node == kNone) return true;
  const std::uint32_t occupant = state_.occupant[candidate.fixed];
  if (occupant == kNone) return true;
  const Node& node = state_.graph.nodes[candidate.node];
  if (node.target == occupant || (node.isLiveOutCopy && node.a.number == occupant)) return true;
  auto times = std::count(candidate.reads.begin(), candidate.reads.end(), occupant);
  for (const Candidate* c : bundle) times += std::count(c->reads.begin(), c->reads.end(), occupant);
  return state_.values[occupant].updates == 0 && !state_.graph.values[occupant].liveOut &&
         static_cast<std::uint32_t>(times) >= state_.values[occupant].reads;
}

// Returns true if there are registers for all results of the bundle and the candidate.
bool Bundler::resultFits(const Bundle& bundle, const Candidate& candidate) const {
  const FreeRegisters free = files_.freeAfter(bundle, candidate);
  if ((candidate.takesR4 && !free.r4) || (candidate.takesR5 && !free.r5)) return false;
  if (candidate.pipes == 0 && !candidate.fillsInstruction) return true;
  const Candidate* other = nullptr;
  for (const Candidate* c : bundle)
    if (c->pipes != 0) other = c;
  const std::uint8_t own = files_.choices(candidate, free);
  if (own == 0) return false;
  if (candidate.prefersAccumulator && !ignoresPreference_) {
    const bool both = other != nullptr && other->prefersAccumulator;
    const std::uint32_t rest = both ? free.accumulators & (free.accumulators - 1) : free.accumulators;
    if (rest == 0) return false;
  }
  if (other == nullptr) return true;
  if (!pipesFit(candidate, *other)) return false;
  const std::uint8_t others = files_.choices(*other, free);
  for (const std::uint8_t x : kFiles)
    for (const std::uint8_t y : kFiles)
      if ((own & x) != 0 && (others & y) != 0 && FileChooser::canPair(candidate, x, *other, y, free)) return true;
  return false;
}

Bundle Bundler::fill(std::size_t first) {
  Bundle bundle;
  if (!fits(bundle, candidates_[first])) return bundle;
  bundle.add(candidates_[first]);
  if (!state_.options.pair) return bundle;
  for (std::size_t k = 0; k < candidates_.size(); ++k) {
    if (k == first || bundle.count == bundle.candidates.size()) continue;
    if (fits(bundle, candidates_[k])) bundle.add(candidates_[k]);
  }
  if (bundle.alus < 2) addFollower(bundle);
  return bundle;
}

// Adds an operation that overwrites a register. The operation can issue together with the last
// operation that reads the register.
void Bundler::addFollower(Bundle& bundle) {
  const unsigned before = bundle.count;
  for (unsigned k = 0; k < before && bundle.count < bundle.candidates.size(); ++k) {
    const std::uint32_t n = bundle.candidates[k]->node;
    if (n == kNone) continue;
    for (const Edge& edge : state_.graph.edgesOf(n)) {
      if (edge.latency != 0 || state_.nodes[edge.to].pendingEdges != 1 || !state_.canIssue(edge.to)) continue;
      Candidate candidate;
      const std::size_t requests = planner_.requests().size();
      const bool isPlanned = planner_.planNode(edge.to, candidate);
      planner_.keepRequests(requests);
      if (!isPlanned || !fits(bundle, candidate) || followerCount_ == kMostFollowers) continue;
      followers_[followerCount_] = candidate;
      bundle.add(followers_[followerCount_++]);
      if (bundle.alus == 2 || bundle.count == bundle.candidates.size()) return;
    }
  }
}

// If the MUL pipe is idle, uses it to move the value out of r5.
void Bundler::vacateR5(Bundle& bundle) {
  if (followerCount_ == kMostFollowers || bundle.count == bundle.candidates.size()) return;
  for (const Candidate* c : bundle)
    if (c->pipes != kAddPipe && c->pipes != 0) return;
  Candidate& candidate = followers_[followerCount_];
  candidate = Candidate();
  if (!copies_.planVacateR5(candidate) || !fits(bundle, candidate)) return;
  ++followerCount_;
  bundle.add(candidate);
}

// A bundle of two operations scores higher than a single operation. The pipe with more remaining
// work should execute operations that the other pipe cannot execute.
int Bundler::scoreOf(const Bundle& bundle) const {
  const std::uint8_t scarce = state_.work.mul > state_.work.add ? kMulPipe : kAddPipe;
  const bool usesScarce =
      std::any_of(bundle.begin(), bundle.end(), [&](const Candidate* c) { return c->pipes == scarce; });
  return (bundle.alus == 2 ? 2 : 0) + (usesScarce ? 1 : 0);
}

}  // namespace qpu::compiler
