#include "compiler/schedule_state.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

// Maximum distance between operations that are considered close to each other.
constexpr std::uint32_t kNearby = 8;
constexpr unsigned kFewUsers = 3;

std::uint32_t poolOf(const ScheduleOptions& options, unsigned file) {
  const std::uint32_t all = options.fileRegisters >= 32
                                ? UINT32_MAX
                                : (1U << static_cast<unsigned>(options.fileRegisters)) - 1U;
  return all & ~static_cast<std::uint32_t>(options.reserved >> (32U * file));
}

}  // namespace

void ReadyLists::insert(std::uint32_t node) {
  insert(listOf(node), node);
  if (graph_.nodes[node].form == Node::Form::Wait) insert(waits_, node);
}

void ReadyLists::remove(std::uint32_t node) {
  remove(listOf(node), node);
  if (graph_.nodes[node].form == Node::Form::Wait) remove(waits_, node);
}

void ReadyLists::insert(std::vector<std::uint32_t>& list, std::uint32_t node) const {
  list.insert(std::upper_bound(list.begin(), list.end(), node,
                               [this](std::uint32_t x, std::uint32_t y) { return precedes(x, y); }),
              node);
}

void ReadyLists::remove(std::vector<std::uint32_t>& list, std::uint32_t node) const {
  list.erase(std::lower_bound(list.begin(), list.end(), node,
                              [this](std::uint32_t x, std::uint32_t y) { return precedes(x, y); }));
}

std::vector<std::uint32_t>& ReadyLists::listOf(std::uint32_t node) {
  const Place result = graph_.nodes[node].result;
  if (result == kR5) return forR5_;
  if (result == kR4) return forR4_;
  return others_;
}

void PipeWork::count(const Node& node, int by) {
  if (node.pipes == kAddPipe) add += by;
  if (node.pipes == kMulPipe) mul += by;
  if (node.pipes == (kAddPipe | kMulPipe)) either += by;
}

std::int32_t PipeWork::instructions() const { return std::max({add, mul, (add + mul + either + 1) / 2}); }

BlockState::BlockState(const Graph& blockGraph, const ScheduleOptions& scheduleOptions)
    : graph(blockGraph), options(scheduleOptions), nodes(graph.nodes.size()), values(graph.values.size()),
      poolA(poolOf(options, 0)), poolB(poolOf(options, 1)),
      freeA(poolA & ~static_cast<std::uint32_t>(options.occupied)),
      freeB(poolB & ~static_cast<std::uint32_t>(options.occupied >> 32U)),
      pressure(graph, poolA, poolB), ready(graph) {
  occupant.fill(kNone);
  for (std::uint32_t v = 0; v < values.size(); ++v) {
    const Value& value = graph.values[v];
    for (const std::uint32_t u : users(v))
      for (std::size_t pipe = 0; pipe < 2; ++pipe)
        if (readsInPipe(graph.nodes[u], pipe)) ++values[v].byPipe[pipe];
    countReads(v, countedAt(v), 1);
    values[v].reads = value.reads;
    values[v].updates = value.updates;
    values[v].rotations = value.rotations;
    if (value.liveIn) {
      values[v].main = value.home;
      occupant[value.home] = v;
    }
  }
  for (Place p = 0; p < kR0; ++p)
    if (((options.unreadable >> p) & 1U) != 0) readableAt[p] = 1;
  for (std::uint32_t n = 0; n < nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    nodes[n].pendingEdges = node.predecessors;
    if (node.removed) {
      nodes[n].done = true;
      continue;
    }
    ++remaining;
    work.count(node, 1);
    if (node.predecessors == 0) ready.insert(n);
  }
}

bool BlockState::isShortLived(std::uint32_t v) const {
  unsigned open = 0;
  for (const std::uint32_t u : users(v)) {
    if (nodes[u].done) continue;
    if (++open > kFewUsers || nodes[u].pendingEdges > 1 || (!isInWindow(u) && u >= oldest + kNearby)) return false;
  }
  return true;
}

bool BlockState::isPinned(std::uint32_t v) const {
  const Users all = users(v);
  return std::any_of(all.begin(), all.end(), [&](std::uint32_t u) {
    const Node& n = graph.nodes[u];
    return n.rotate == kRotateByR5 && n.b.isValue() && n.b.number == v;
  });
}

void BlockState::release(std::uint32_t v) {
  pressure.release(v, oldest);
  vacate(values[v].main);
  vacate(values[v].copy);
  values[v].main = values[v].copy = kNowhere;
}

void BlockState::occupy(Place p, std::uint32_t v) {
  occupant[p] = v;
  if (isFileA(p)) freeA &= ~registerBit(p);
  if (isFileB(p)) freeB &= ~registerBit(p);
}

void BlockState::vacate(Place p) {
  if (p == kNowhere) return;
  occupant[p] = kNone;
  if (isFileA(p)) freeA |= registerBit(p) & poolA;
  if (isFileB(p)) freeB |= registerBit(p) & poolB;
}

bool BlockState::isDroppable(Place p) const {
  const std::uint32_t v = occupant[p];
  if (v == kNone || values[v].copy != p) return false;
  return values[v].rotations == 0 && !isHeld(v);
}

std::uint32_t BlockState::availableAccumulators() const {
  std::uint32_t mask = 0;
  for (Place p = kR0; p < kR4; ++p)
    if (occupant[p] == kNone || isDroppable(p)) mask |= 1U << (p - kR0);
  return mask;
}

void BlockState::countReads(std::uint32_t v, Place p, int by) {
  if (!isFile(p)) return;
  for (std::size_t pipe = 0; pipe < 2; ++pipe)
    fileReads[pipe][isFileA(p) ? 0 : 1] += by * values[v].byPipe[pipe];
}

}  // namespace qpu::compiler
