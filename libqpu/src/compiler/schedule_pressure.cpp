#include "compiler/schedule_pressure.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

// The maximum distance between the definition and the use of a value that is kept in an
// accumulator.
constexpr std::uint32_t kAccumulatorDistance = 2;

}  // namespace

PressureTracker::PressureTracker(const Graph& graph, std::uint32_t poolA, std::uint32_t poolB)
    : live_(graph.nodes.size() + 1, 0), isCounted_(graph.values.size(), 0), lastUse_(graph.values.size(), 0) {
  std::vector<std::uint32_t> defined(graph.values.size(), 0);
  for (std::uint32_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    for (const Source* s : {&node.a, &node.b})
      if (s->isValue()) lastUse_[s->number] = n;
    if (node.target == kNone) continue;
    lastUse_[node.target] = n;
    if (!isConditionalWrite(node)) defined[node.target] = n;
  }
  for (std::uint32_t v = 0; v < graph.values.size(); ++v) {
    const Place home = graph.values[v].home;
    if (home != kNowhere && ((isFileA(home) ? poolA : poolB) & registerBit(home)) == 0) continue;
    if (lastUse_[v] <= defined[v] + kAccumulatorDistance) continue;
    isCounted_[v] = 1;
    ++live_[defined[v]];
    --live_[lastUse_[v]];
  }
  std::int16_t most = 0;
  for (std::size_t k = 1; k < live_.size(); ++k) {
    live_[k] = static_cast<std::int16_t>(live_[k] + live_[k - 1]);
    most = std::max(most, live_[k]);
  }
  const int pool = __builtin_popcount(poolA) + __builtin_popcount(poolB);
  capacity_ = std::max(most, static_cast<std::int16_t>(pool));
}

bool PressureTracker::hasRoom(std::uint32_t oldest, std::uint32_t node) const {
  std::int16_t most = 0;
  for (std::uint32_t k = oldest; k < node; ++k) most = std::max(most, live_[k]);
  return most < capacity_;
}

}  // namespace qpu::compiler
