#include "compiler/schedule_receives.hpp"

namespace qpu::compiler {
namespace {

// The length in instructions of the gap between the block's last two receives. QPUs in a slice that
// wait for the same cache line continue at the same time, so their next requests queue at the TMU.
// If the gap is as long as the time for a request, the QPUs that the other TMU serves last continue
// later than the others. The requests are therefore spread over time. The block's branch is often
// in the gap.
constexpr std::int32_t kReceiveGap = kTmuRequest;

}  // namespace

ReceiveTiming::ReceiveTiming(const BlockState& state)
    : state_(state), dependsOnReceive_(state.graph.nodes.size(), false) {
  for (std::uint32_t n = 0; n < state.graph.nodes.size(); ++n) {
    const Node& node = state.graph.nodes[n];
    if (node.form == Node::Form::Receive) dependsOnReceive_[n] = true;
    if (dependsOnReceive_[n])
      for (const Edge& edge : state.graph.edgesOf(n)) dependsOnReceive_[edge.to] = true;
  }
  for (std::uint32_t n = 0; n < state.graph.nodes.size(); ++n) {
    if (state.graph.nodes[n].removed) continue;
    if (!dependsOnReceive_[n]) ++independent_;
    if (state.graph.nodes[n].form == Node::Form::Receive) ++receives_;
  }
}

bool ReceiveTiming::isDelayed(std::uint32_t n) {
  using Receives = ScheduleOptions::Receives;
  const Node::Form form = state_.graph.nodes[n].form;
  if (form == Node::Form::Wait) return state_.options.lateWaits;
  if (form != Node::Form::Receive || state_.options.receives == Receives::Early) return false;
  if (isLastOfSpread()) return independent_ > 0 || isInGap();
  while (firstRequest_ < state_.nodes.size() &&
         (state_.nodes[firstRequest_].done || !isRequest(state_.graph.nodes[firstRequest_])))
    ++firstRequest_;
  return firstRequest_ < n;
}

bool ReceiveTiming::isInGap() const { return isLastOfSpread() && state_.cycle < gapEnd_; }

void ReceiveTiming::issue(std::uint32_t n) {
  if (!dependsOnReceive_[n]) --independent_;
  if (state_.graph.nodes[n].form != Node::Form::Receive) return;
  --receives_;
  gapEnd_ = state_.cycle + kReceiveGap;
}

}  // namespace qpu::compiler
