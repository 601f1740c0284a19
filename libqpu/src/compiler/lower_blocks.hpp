// The basic blocks of the kernel that is being lowered, and the values of its variables where
// control-flow paths join.
#ifndef QPU_SRC_COMPILER_LOWER_BLOCKS_HPP
#define QPU_SRC_COMPILER_LOWER_BLOCKS_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "compiler/lower_context.hpp"

namespace qpu::compiler {

class BlockBuilder {
 public:
  explicit BlockBuilder(LowerContext& context) : c_(context) {}

  std::uint32_t newBlock();
  // Appends the block to the kernel. New values are then added to the end of this block.
  void place(std::uint32_t b);
  bool isReachable(std::uint32_t b) const { return !c_.graph.blocks[b].preds.empty(); }
  std::size_t predecessors(std::uint32_t b) const { return c_.graph.blocks[b].preds.size(); }
  std::uint32_t lastPlaced() const { return order_.back(); }

  // jump() and branch() end the current block.
  void jump(std::uint32_t to);
  void branch(ir::Value mask, bool all, std::uint32_t yes, std::uint32_t no);

  std::uint32_t loop() const { return loop_; }
  // Starts a loop. The loop contains the blocks that are placed before endLoop() is called. Returns
  // the enclosing loop.
  std::uint32_t beginLoop(const ir::Loop& loop);
  void endLoop(std::uint32_t outer) { loop_ = outer; }

  // Sets the variables at the start of the current block. variables[i] is set to first[i] if
  // control came from one of the block's first `count` predecessors, and to second[i] otherwise.
  void merge(const std::vector<std::uint32_t>& variables, std::size_t count, const std::vector<ir::Value>& first,
             const std::vector<ir::Value>& second);
  std::vector<ir::Value> valuesOf(const std::vector<std::uint32_t>& variables) const;
  void restore(const std::vector<std::uint32_t>& variables, const std::vector<ir::Value>& values);

  // Renumbers the blocks in the order in which they were placed.
  void number();

 private:
  LowerContext& c_;
  std::vector<std::uint32_t> order_;
  std::uint32_t loop_ = ir::kNone;
};

}  // namespace qpu::compiler

#endif
