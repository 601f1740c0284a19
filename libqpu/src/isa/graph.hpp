// The paths through a program, with delay slots: a node is an instruction in
// one of the places where a path may meet it. A node that branches is followed
// by nodes for its slots, the last of which has the target as a successor.
#ifndef QPU_SRC_ISA_GRAPH_HPP
#define QPU_SRC_ISA_GRAPH_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::isa {

enum class Place : std::uint8_t {
  Plain, Slot1, Slot2, Slot3,  // after a branch
  EndSlot1, EndSlot2           // after a program end
};
constexpr std::size_t kPlaces = 6;

class Graph {
 public:
  using Node = std::uint32_t;

  // `decoded` is the program; instructions of unknown meaning are nops.
  explicit Graph(const std::vector<Instruction>& decoded);

  // In some order that starts at the program's start.
  const std::vector<Node>& reachable() const { return reachable_; }
  const std::vector<Node>& successors(Node n) const { return successors_[n]; }
  const std::vector<Node>& predecessors(Node n) const { return predecessors_[n]; }
  std::size_t nodes() const { return successors_.size(); }

  // Instructions after which a path leaves the program.
  const std::vector<std::size_t>& leaving() const { return leaving_; }

  static std::size_t instruction(Node n) { return n / kPlaces; }
  static Place place(Node n) { return static_cast<Place>(n % kPlaces); }

 private:
  void follow(const std::vector<Instruction>& decoded, Node n);
  void connect(Node from, std::size_t instruction, Place place);

  std::size_t count_;
  std::vector<std::vector<Node>> successors_;
  std::vector<std::vector<Node>> predecessors_;
  std::vector<Node> reachable_;
  std::vector<bool> seen_;
  std::vector<std::size_t> leaving_;
};

// The instruction that a relative branch at `at` goes to, if it is one of the
// program's `count`.
bool branchTarget(const Instruction& branch, std::size_t at, std::size_t count,
                  std::size_t& target);

}  // namespace qpu::isa

#endif
