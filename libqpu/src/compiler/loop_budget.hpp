// The register pressure of loops, for passes that save operations but need more registers.
#ifndef QPU_SRC_COMPILER_LOOP_BUDGET_HPP
#define QPU_SRC_COMPILER_LOOP_BUDGET_HPP

#include <algorithm>
#include <cstdint>
#include <vector>

#include "compiler/ir_liveness.hpp"

namespace qpu::compiler {

inline bool isInside(const ir::Loop& l, std::uint32_t block) {
  return block != ir::kNone && block >= l.header && block <= l.last;
}

// The register pressure of each loop. Later changes to these numbers are estimates.
class LoopBudget {
 public:
  LoopBudget(const ir::Graph& graph, std::uint32_t limit) : graph_(graph), limit_(limit) {
    const IrLiveness live(graph);
    for (const ir::Loop& l : graph.loops) pressure_.push_back(live.pressure(l));
  }
  bool hasRoom(std::uint32_t loop) const { return pressure_[loop] < limit_; }
  std::uint32_t room(std::uint32_t loop) const { return hasRoom(loop) ? limit_ - pressure_[loop] : 0; }
  // Records that one more value is live in the loop.
  void take(std::uint32_t loop) {
    const std::uint32_t now = ++pressure_[loop];
    for (std::uint32_t l = graph_.loops[loop].parent; l != ir::kNone; l = graph_.loops[l].parent)
      pressure_[l] = std::max(pressure_[l], now);
  }
  void giveBack(std::uint32_t loop) { --pressure_[loop]; }

 private:
  const ir::Graph& graph_;
  const std::uint32_t limit_;
  std::vector<std::uint32_t> pressure_;
};

}  // namespace qpu::compiler

#endif
