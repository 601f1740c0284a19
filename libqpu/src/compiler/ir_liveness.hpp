// Liveness and register pressure of values in SSA form. A phi's argument is live at the end of
// the corresponding predecessor, as in Sebastian Hack, "Register Allocation for Programs in SSA
// Form", 2007.
#ifndef QPU_SRC_COMPILER_IR_LIVENESS_HPP
#define QPU_SRC_COMPILER_IR_LIVENESS_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "compiler/ir.hpp"

namespace qpu::compiler {

// Calls f(Value) for each value that must be in a register when v is used. A mask is not in a
// register, so f is called for the mask's operands instead.
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

  // Returns the maximum number of values that are live at the same time in the block.
  std::uint32_t pressure(std::uint32_t block) const { return pressure_[block]; }
  // Returns the maximum number of values that are live at the same time in any block of the loop.
  std::uint32_t pressure(const ir::Loop& loop) const;
  // Returns the values that are live at the point where the block's register pressure is highest.
  // Sets `position` so that this point is before body[position].
  std::vector<ir::Value> atPeak(std::uint32_t block, std::size_t& position) const;

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
  // Scans the block backward. Calls at(position, live values) for the point before each
  // instruction until the callback returns false.
  template <typename F>
  void scan(std::uint32_t block, std::vector<char>& isLive, F at) const;

  const ir::Graph& graph_;
  std::vector<std::uint32_t> bit_;
  std::vector<ir::Value> globals_;
  std::size_t words_ = 0;
  Sets in_, out_;
  std::vector<std::uint32_t> pressure_;
};

}  // namespace qpu::compiler

#endif
