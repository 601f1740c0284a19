// Which values are alive where, and how many registers that takes.
#ifndef QPU_SRC_COMPILER_IR_LIVENESS_HPP
#define QPU_SRC_COMPILER_IR_LIVENESS_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "compiler/ir.hpp"

namespace qpu::compiler {

// A mask has no register; who uses it uses what it compares.
template <typename F>
void forUsed(const ir::Graph& graph, ir::Value v, F f) {
  const ir::Instruction& i = graph.values[v];
  if (i.kind == ir::Kind::Constant) return;
  if (!ir::isMask(i.kind)) {
    f(v);
    return;
  }
  forUsed(graph, i.a, f);
  if (i.b != ir::kNone) forUsed(graph, i.b, f);
}
template <typename F>
void forUses(const ir::Graph& graph, const ir::Instruction& i, F f) {
  if (i.a != ir::kNone) forUsed(graph, i.a, f);
  if (i.b != ir::kNone) forUsed(graph, i.b, f);
  if (i.c != ir::kNone) forUsed(graph, i.c, f);
}

class IrLiveness {
 public:
  explicit IrLiveness(const ir::Graph& graph);

  // The most values that are alive at once in the block, and before which
  // instruction of its body that is.
  std::uint32_t pressure(std::uint32_t block) const { return pressure_[block]; }
  // Over the blocks of a loop.
  std::uint32_t pressure(const ir::Loop& loop) const;
  // Those alive where the pressure of the block is highest: before body[place].
  std::vector<ir::Value> atPeak(std::uint32_t block, std::size_t& place) const;

  bool isLiveIn(std::uint32_t block, ir::Value v) const { return test(in_, block, v); }

 private:
  using Sets = std::vector<std::uint64_t>;

  bool test(const Sets& s, std::size_t block, ir::Value v) const {
    const std::uint32_t bit = bit_[v];
    return bit != ir::kNone && (s[block * words_ + bit / 64] >> (bit % 64) & 1U) != 0;
  }
  static void set(Sets& s, std::size_t at, std::uint32_t bit) {
    s[at + bit / 64] |= std::uint64_t{1} << (bit % 64);
  }
  void findGlobals();
  void flow();
  // Goes through the block backward; calls at(place, count) after each step.
  template <typename F>
  void scan(std::uint32_t block, std::vector<char>& alive, F at) const;

  const ir::Graph& graph_;
  std::vector<std::uint32_t> bit_;
  std::vector<ir::Value> globals_;
  std::size_t words_ = 0;
  Sets in_, out_;  // arguments of phis are alive out of the ways in
  std::vector<std::uint32_t> pressure_;
};

}  // namespace qpu::compiler

#endif
