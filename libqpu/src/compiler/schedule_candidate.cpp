#include "compiler/schedule_candidate.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

namespace address = isa::address;
using isa::Mux;

constexpr std::int32_t kRotationBase = 48;  // the small-immediate code that means a rotation by 0

Mux muxOf(Place p) {
  if (isFileA(p)) return Mux::A;
  if (isFileB(p)) return Mux::B;
  return static_cast<Mux>(p - kR0);
}

Mux muxOf(const Source& s, Place p, Candidate& candidate) {
  switch (s.kind) {
    case Source::Kind::Value: return muxOf(p);
    case Source::Kind::Small: return Mux::B;
    case Source::Kind::ReadB: candidate.portB = static_cast<std::uint8_t>(s.number); return Mux::B;
    case Source::Kind::ReadA:
    case Source::Kind::ReadEither:
      candidate.portA = static_cast<std::uint8_t>(s.number);
      return Mux::A;
    default: return Mux::R0;
  }
}

void usePort(Candidate& candidate, Place p) {
  if (isFileA(p)) candidate.portA = p;
  if (isFileB(p)) candidate.portB = static_cast<std::uint8_t>(p - kFileB);
}

void setTarget(Candidate& candidate, Place place) {
  candidate.fixed = place;
  candidate.files = fileOf(place);
}

}  // namespace

void CandidateList::add(const Candidate& candidate) {
  std::size_t at = list_.size();
  list_.push_back(candidate);
  for (; at > 0 && list_[at - 1].priority < candidate.priority; --at) list_[at] = list_[at - 1];
  list_[at] = candidate;
}

bool Planner::planNode(std::uint32_t n, Candidate& candidate) {
  const Node& node = state_.graph.nodes[n];
  candidate.node = n;
  candidate.priority = node.height;
  candidate.pipes = node.pipes;
  candidate.exclusive = node.exclusive;
  candidate.setsFlags = node.setsFlags;
  candidate.fillsInstruction =
      node.form != Node::Form::Alu && node.form != Node::Form::Receive && node.form != Node::Form::Wait;
  if (!planSources(n, node, candidate)) return false;
  planTarget(node, candidate);
  return true;
}

bool Planner::planCopy(std::uint32_t v, bool relocates, std::uint8_t allowed, std::uint32_t node,
                       std::int32_t priority, Candidate& candidate) const {
  const ValueState& value = state_.values[v];
  const Place from = state_.isReadable(value.main) ? value.main : value.copy;
  if (!state_.isReadable(from)) return false;
  candidate.value = v;
  candidate.copyFor = node;
  candidate.relocates = relocates;
  candidate.pipes = kAddPipe | kMulPipe;
  usePort(candidate, from);
  candidate.a = candidate.b = muxOf(from);
  candidate.choosesPlace = true;
  candidate.files = allowed;
  candidate.priority = priority;
  return true;
}

bool Planner::planSources(std::uint32_t n, const Node& node, Candidate& candidate) {
  const bool isValueA = node.a.isValue();
  const bool isValueB = node.b.isValue();
  const bool isSame = isValueA && isValueB && node.a.number == node.b.number;
  if (isValueA) candidate.reads[0] = node.a.number;
  if (isValueB && !isSame) candidate.reads[1] = node.b.number;
  if (node.rotate != 0) return planRotation(n, node, candidate);
  for (const Source* s : {&node.a, &node.b}) {
    if (s->kind == Source::Kind::Small) {
      if (candidate.small >= 0 && candidate.small != static_cast<int>(s->number)) return false;
      candidate.small = static_cast<std::int16_t>(s->number);
      candidate.portB = static_cast<std::uint8_t>(s->number);
    }
  }
  const bool hasSmallImmediate = candidate.small >= 0;
  Place pa = kNowhere;
  Place pb = kNowhere;
  Operands found = Operands::Readable;
  if (isSame) {
    found = findOne(node.a.number, hasSmallImmediate, pa);
    pb = pa;
  } else if (isValueA && isValueB) {
    found = findTwo(node.a.number, node.b.number, pa, pb);
  } else if (isValueA) {
    found = findOne(node.a.number, hasSmallImmediate, pa);
  } else if (isValueB) {
    found = findOne(node.b.number, hasSmallImmediate, pb);
  }
  if (found == Operands::NeedCopy) requestOperand(n, node, hasSmallImmediate);
  if (found != Operands::Readable) return false;
  usePort(candidate, pa);
  usePort(candidate, pb);
  candidate.a = muxOf(node.a, pa, candidate);
  candidate.b = node.b.kind == Source::Kind::None ? candidate.a : muxOf(node.b, pb, candidate);
  return true;
}

bool Planner::planRotation(std::uint32_t n, const Node& node, Candidate& candidate) {
  if (node.rotate == kRotateByR5 && state_.readableAt[kR5] + 1 > state_.cycle) return false;
  if (node.a.isValue()) {
    Place p = kNowhere;
    const Operands found = findRotated(node, node.a.number, p);
    if (found == Operands::NeedCopy) request(node.a.number, n, kToNeither);
    if (found != Operands::Readable) return false;
    usePort(candidate, p);
    candidate.a = candidate.b = muxOf(p);
  }
  candidate.small =
      static_cast<std::int16_t>(kRotationBase + (node.rotate == kRotateByR5 ? 0 : node.rotate));
  candidate.portB = static_cast<std::uint8_t>(candidate.small);
  return true;
}

void Planner::planTarget(const Node& node, Candidate& candidate) const {
  if (node.isLiveOutCopy) {
    candidate.relocates = true;
    candidate.value = node.a.number;
    setTarget(candidate, state_.graph.values[node.a.number].home);
    return;
  }
  if (node.result == kR4) candidate.takesR4 = true;
  if (node.result == kR5) candidate.takesR5 = true;
  if (node.address != address::kNop || node.target == kNone || node.result != kNowhere) {
    candidate.files = node.files;
    return;
  }
  const Value& v = state_.graph.values[node.target];
  const Place current = state_.values[node.target].main;
  if (current != kNowhere) {  // an update writes the register that holds the value
    setTarget(candidate, current);
  } else if (v.liveOut) {
    setTarget(candidate, v.home);
  } else if (state_.isNeeded(node.target)) {
    candidate.choosesPlace = true;
    candidate.files = 0;
    candidate.prefersAccumulator = v.updates == 0 && state_.isShortLived(node.target);
  }
}

// A rotation reads its vector from an accumulator. A rotation within a quad can also read its
// vector from file A or r4.
Planner::Operands Planner::findRotated(const Node& n, std::uint32_t v, Place& place) const {
  bool isSuitable = false;
  for (const Place p : {state_.values[v].main, state_.values[v].copy}) {
    if (p == kNowhere) continue;
    const bool isQuadSource = n.quadSource && (isFileA(p) || p == kR4);
    if (!isAccumulator(p) && !isQuadSource) continue;
    if (state_.readableAt[p] + (isFileA(p) ? 0 : 1) <= state_.cycle) {
      place = p;
      return Operands::Readable;
    }
    isSuitable = true;
  }
  return isSuitable ? Operands::NotYet : Operands::NeedCopy;
}

Planner::Operands Planner::findOne(std::uint32_t v, bool isPortBTaken, Place& place) const {
  bool isSuitable = false;
  for (const Place p : placesOf(v)) {
    if (p == kNowhere || (isPortBTaken && isFileB(p))) continue;
    if (state_.isReadable(p)) {
      place = p;
      return Operands::Readable;
    }
    isSuitable = true;
  }
  return isSuitable ? Operands::NotYet : Operands::NeedCopy;
}

// An instruction can read only one register from each file.
Planner::Operands Planner::findTwo(std::uint32_t x, std::uint32_t y, Place& px, Place& py) const {
  bool isSuitable = false;
  for (const Place p : placesOf(x)) {
    if (p == kNowhere) continue;
    for (const Place q : placesOf(y)) {
      if (q == kNowhere) continue;
      if (p != q && ((isFileA(p) && isFileA(q)) || (isFileB(p) && isFileB(q)))) continue;
      if (state_.isReadable(p) && state_.isReadable(q)) {
        px = p;
        py = q;
        return Operands::Readable;
      }
      isSuitable = true;
    }
  }
  return isSuitable ? Operands::NotYet : Operands::NeedCopy;
}

void Planner::request(std::uint32_t v, std::uint32_t n, std::uint8_t allowed) {
  for (const CopyRequest& r : requests_)
    if (r.value == v) return;
  requests_.push_back({v, n, allowed, state_.graph.nodes[n].height});
}

// Requests a copy of an operand, because both values are in the same file, or because one value
// is in file B while the other operand is a small immediate.
void Planner::requestOperand(std::uint32_t n, const Node& node, bool hasSmallImmediate) {
  std::uint32_t v = node.a.isValue() ? node.a.number : node.b.number;
  if (hasSmallImmediate) {
    if (node.b.isValue()) v = node.b.number;
    request(v, n, kToA | kToNeither);
    return;
  }
  // Prefer to copy the value that has more remaining reads.
  if (node.b.isValue() && state_.values[node.b.number].reads > state_.values[v].reads) v = node.b.number;
  request(v, n, static_cast<std::uint8_t>((isFileA(state_.values[v].main) ? kToB : kToA) | kToNeither));
}

}  // namespace qpu::compiler
