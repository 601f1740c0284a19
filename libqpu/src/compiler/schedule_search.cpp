#include "compiler/schedule_search.hpp"

#include <algorithm>
#include <array>
#include <tuple>

namespace qpu::compiler {
namespace {

constexpr double kSignificant = 0.95;  // improvements of less than 5 % are considered noise
// A schedule with spread receives is used even if its estimate is higher by up to this factor.
// The estimate is for a single QPU, but spread receives help more when several QPUs share a TMU.
constexpr double kSpreadAllowance = 1.1;
constexpr double kQpusPerSlice = 4;  // the QPUs in a slice share two TMUs

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
  ScheduleOptions options;
  options.fileRegisters = options_.fileRegisters;
  options.pair = options_.level > 0;
  options.occupied = homesOf(live_.in[b]);
  options.reserved = homesOf(live_.out[b]);
  options.unreadable = unreadable;
  const Graph graph = buildGraph(context);
  static constexpr std::array<std::uint32_t, 4> kWindows{160, 40, 8, 1};
  for (const std::uint32_t window : kWindows) {
    if (options_.level == 0 && window != 1) continue;
    options.window = window;
    std::optional<ScheduledBlock> result = schedule(graph, options);
    if (!result) continue;
    if (window == kWindows.front() && readsVpmOften(b)) {
      // Try both settings of alternateFiles, because neither setting is always better.
      options.alternateFiles = true;
      std::optional<ScheduledBlock> other = schedule(graph, options);
      if (other && other->slots.size() < result->slots.size()) return other;
      options.alternateFiles = false;
    }
    if (options_.level > 0 && function_.blocks[b].loopDepth > 0) reduceStalls(graph, options, *result, b);
    return result;
  }
  if (!context.fuse) return std::nullopt;
  context.fuse = false;
  return schedule(buildGraph(context), options);
}

// Tries other orders if the QPU stalls on memory accesses in the block.
void ScheduleSearch::reduceStalls(const Graph& graph, ScheduleOptions options, ScheduledBlock& best,
                                  std::uint32_t b) const {
  using Receives = ScheduleOptions::Receives;
  const bool repeats = isLoop(b);
  const Surroundings around = surroundings(b);
  Estimate least = estimate(best, around);
  const auto tryOrder = [&](const Graph& order, Receives receives, bool lateWaits, std::uint32_t window) {
    if (least.stalls <= 0 && (!repeats || least.totalIfSlow <= least.total)) return;
    options.receives = receives;
    options.lateWaits = lateWaits;
    options.window = window;
    std::optional<ScheduledBlock> other = schedule(order, options);
    if (!other) return;
    const Estimate e = estimate(*other, around);
    const bool isBetter = std::tie(e.total, e.totalIfSlow) < std::tie(least.total, least.totalIfSlow);
    if (receives == Receives::Spread ? e.total > kSpreadAllowance * least.total
        : repeats                    ? !isBetter
                                     : e.total >= kSignificant * least.total)
      return;
    least = e;
    best = std::move(*other);
  };
  const std::uint32_t window = options.window;
  tryOrder(graph, Receives::AfterRequests, false, window);
  if (!repeats) return;
  tryOrder(graph, Receives::AfterRequests, true, window);
  tryOrder(graph, Receives::Early, true, window);
  tryOrder(graph, Receives::Early, false, 1);  // source order
  if (inFlight_.fewest[b][0] + inFlight_.fewest[b][1] == 0) return;
  // The loop is software-pipelined: each iteration receives the results that the previous iteration
  // requested.
  Graph early = graph;
  prioritiseRequests(early);
  tryOrder(early, Receives::AfterRequests, false, window);
  // If there were no stalls, the QPUs in a slice would send more requests than a TMU can serve.
  if (least.total - least.stalls < kQpusPerSlice * kTmuRequest * static_cast<double>(requestsOf(b)))
    tryOrder(early, Receives::Spread, false, window);
}

// Returns true if the block is in a loop and has so many VPM reads that the choice of registers
// may be significant.
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

// Returns the number of requests to the TMU that receives more requests.
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
