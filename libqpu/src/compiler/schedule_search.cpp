#include "compiler/schedule_search.hpp"

#include <algorithm>
#include <array>
#include <tuple>

namespace qpu::compiler {
namespace {

constexpr double kWorthIt = 0.95;  // of an estimate: what is less different is chance
// Spread receives may take this much more by the estimate, which is for one QPU: several that share a TMU gain more.
constexpr double kSpreadMayTake = 1.1;
constexpr double kQpusOfSlice = 4;  // share two TMUs

}  // namespace

std::optional<ScheduledBlock> ScheduleSearch::run(std::uint32_t b, std::uint64_t unreadable) const {
  BlockContext context;
  context.function = &function_;
  context.live = &live_;
  context.homes = &homes_;
  context.block = b;
  context.fewestInFlight = inFlight_.fewest[b];
  context.mostInFlight = inFlight_.most[b];
  context.fuse = options_.level > 0;
  context.setNoSwap = b == 0 && function_.usesTwoTmus;
  ScheduleOptions so;
  so.fileRegisters = options_.fileRegisters;
  so.pair = options_.level > 0;
  so.occupied = homesOf(live_.in[b]);
  so.reserved = homesOf(live_.out[b]);
  so.unreadable = unreadable;
  const Graph graph = buildGraph(context);
  static constexpr std::array<std::uint32_t, 4> kWindows{160, 40, 8, 1};
  for (const std::uint32_t window : kWindows) {
    if (options_.level == 0 && window != 1) continue;
    so.window = window;
    std::optional<ScheduledBlock> result = schedule(graph, so);
    if (!result) continue;
    if (window == kWindows.front() && readsVpmOften(b)) {
      // Neither way is always the shorter.
      so.alternateFiles = true;
      std::optional<ScheduledBlock> other = schedule(graph, so);
      if (other && other->slots.size() < result->slots.size()) return other;
      so.alternateFiles = false;
    }
    if (options_.level > 0 && function_.blocks[b].loopDepth > 0) reduceStalls(graph, so, *result, b);
    return result;
  }
  if (!context.fuse) return std::nullopt;
  context.fuse = false;
  return schedule(buildGraph(context), so);
}

// Other orders, in which the QPU waits less for memory, where the block is slowed down by that.
void ScheduleSearch::reduceStalls(const Graph& graph, ScheduleOptions so, ScheduledBlock& best, std::uint32_t b) const {
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
  if (inFlight_.fewest[b][0] + inFlight_.fewest[b][1] == 0) return;
  // The next run of the block receives what this one requests.
  Graph early = graph;
  prioritiseRequests(early);
  attempt(early, Receives::AfterRequests, false, window);
  // Without waiting the QPUs of a slice would request more than its TMU serves.
  if (least.takes - least.waits < kQpusOfSlice * kTmuRequest * static_cast<double>(requestsOf(b)))
    attempt(early, Receives::Spread, false, window);
}

// Whether the block runs often and reads the VPM so much that its order may matter.
bool ScheduleSearch::readsVpmOften(std::uint32_t b) const {
  constexpr std::ptrdiff_t kMany = 8;
  const std::vector<Operation>& all = function_.blocks[b].operations;
  return function_.blocks[b].loopDepth > 0 &&
         std::count_if(all.begin(), all.end(),
                       [](const Operation& o) { return o.op == Op::VpmRead; }) >= kMany;
}

bool ScheduleSearch::isLoop(std::uint32_t b) const {
  const Successors next = successors(function_.blocks[b]);
  return std::find(next.begin(), next.end(), b) != next.end();
}

// Of the TMU that has more of them.
std::ptrdiff_t ScheduleSearch::requestsOf(std::uint32_t b) const {
  const std::vector<Operation>& all = function_.blocks[b].operations;
  const auto of = [&](unsigned unit) {
    return std::count_if(all.begin(), all.end(),
                         [&](const Operation& o) { return o.op == Op::TmuRequest && (o.unit & 1U) == unit; });
  };
  return std::max(of(0), of(1));
}

std::uint64_t ScheduleSearch::homesOf(const Bits& globals) const {
  std::uint64_t mask = 0;
  for (std::size_t g = 0; g < homes_.size(); ++g)
    if (globals.has(g)) mask |= std::uint64_t{1} << homes_[g];
  return mask;
}

}  // namespace qpu::compiler
