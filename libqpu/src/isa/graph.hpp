// The control-flow graph of a program, including delay slots. A node is an instruction together
// with its position relative to a preceding branch or program end. The node of a branch leads to
// the nodes of its delay slots. The node of the last delay slot leads to the branch target.
#ifndef QPU_SRC_ISA_GRAPH_HPP
#define QPU_SRC_ISA_GRAPH_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa/instruction.hpp"

namespace qpu::isa {

enum class Place : std::uint8_t {
  Plain, Slot1, Slot2, Slot3,  // Slot1..Slot3: delay slots of a branch
  EndSlot1, EndSlot2           // delay slots of a program end
};
constexpr std::size_t kPlaces = 6;

class Graph {
 public:
  using Node = std::uint32_t;

  // `decoded` is the program. Instructions that cannot be decoded are replaced with nops.
  explicit Graph(const std::vector<Instruction>& decoded);

  // The first node is the first instruction of the program.
  const std::vector<Node>& reachable() const { return reachable_; }
  const std::vector<Node>& successors(Node n) const { return successors_[n]; }
  const std::vector<Node>& predecessors(Node n) const { return predecessors_[n]; }
  std::size_t nodes() const { return successors_.size(); }

  // Returns the instructions after which a path leaves the program.
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

// Sets `target` to the target of the relative branch at `at`. Returns false if the target is not
// one of the program's `count` instructions.
bool branchTarget(const Instruction& branch, std::size_t at, std::size_t count,
                  std::size_t& target);

}  // namespace qpu::isa

#endif
