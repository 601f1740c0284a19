#include "isa/graph.hpp"

#include "isa/access.hpp"

namespace qpu::isa {

bool branchTarget(const Instruction& branch, std::size_t at, std::size_t count,
                  std::size_t& target) {
  if (!branch.branchRelative || branch.branchRegister) return false;
  // The immediate is relative to the instruction after the delay slots.
  const auto bytes = static_cast<std::int64_t>(static_cast<std::int32_t>(branch.immediate));
  if (bytes % 8 != 0) return false;
  const std::int64_t to = static_cast<std::int64_t>(at) + 4 + bytes / 8;
  if (to < 0 || to >= static_cast<std::int64_t>(count)) return false;
  target = static_cast<std::size_t>(to);
  return true;
}

Graph::Graph(const std::vector<Instruction>& decoded)
    : count_(decoded.size()),
      successors_(count_ * kPlaces),
      predecessors_(count_ * kPlaces),
      seen_(count_ * kPlaces) {
  if (decoded.empty()) return;
  seen_[0] = true;
  reachable_.push_back(0);
  // follow() appends nodes to the list while this loop runs.
  std::size_t next = 0;
  while (next < reachable_.size()) follow(decoded, reachable_[next++]);
}

void Graph::connect(Node from, std::size_t instruction, Place place) {
  if (instruction >= count_) {
    leaving_.push_back(Graph::instruction(from));
    return;
  }
  const auto to = static_cast<Node>(instruction * kPlaces + static_cast<std::size_t>(place));
  successors_[from].push_back(to);
  predecessors_[to].push_back(from);
  if (seen_[to]) return;
  seen_[to] = true;
  reachable_.push_back(to);
}

void Graph::follow(const std::vector<Instruction>& decoded, Node n) {
  const std::size_t at = instruction(n);
  const Instruction& i = decoded[at];
  switch (place(n)) {
    case Place::Plain:
      if (i.form == Form::Branch)
        connect(n, at + 1, Place::Slot1);
      else
        connect(n, at + 1, accessOf(i).ends ? Place::EndSlot1 : Place::Plain);
      break;
    case Place::Slot1: connect(n, at + 1, Place::Slot2); break;
    case Place::Slot2: connect(n, at + 1, Place::Slot3); break;
    case Place::Slot3: {
      const Instruction& branch = decoded[at - 3];
      std::size_t target = 0;
      const bool known = branchTarget(branch, at - 3, count_, target);
      if (known) connect(n, target, Place::Plain);
      const bool falls = branch.branchCond != BranchCond::Always;
      if (falls && !(known && target == at + 1)) connect(n, at + 1, Place::Plain);
      break;
    }
    case Place::EndSlot1: connect(n, at + 1, Place::EndSlot2); break;
    case Place::EndSlot2: break;
  }
}

}  // namespace qpu::isa
