// Branches on scalar conditions. `And` and `Or` become separate branches (short-circuit
// evaluation). Reference: Alfred V. Aho, Monica S. Lam, Ravi Sethi and Jeffrey D. Ullman,
// "Compilers: Principles, Techniques, and Tools", 2006, section 6.6.
#ifndef QPU_SRC_COMPILER_LOWER_CONDITIONS_HPP
#define QPU_SRC_COMPILER_LOWER_CONDITIONS_HPP

#include <cstdint>
#include <vector>

#include "compiler/lower_blocks.hpp"
#include "compiler/lower_expressions.hpp"

namespace qpu::compiler {

class ConditionLowering {
 public:
  ConditionLowering(LowerContext& context, BlockBuilder& blocks, ExpressionLowering& expressions)
      : c_(context), blocks_(blocks), expressions_(expressions) {}

  // Ends the current block with a branch. If `isLatch` is true, the branch closes a loop and is
  // kept even if the condition is constant.
  void branch(std::uint32_t condition, std::uint32_t yes, std::uint32_t no, bool isLatch = false);

 private:
  using Masks = std::vector<ir::Value>::const_iterator;

  void evaluateMasks(std::uint32_t id, std::vector<ir::Value>& masks);
  void branchOn(std::uint32_t id, Masks& mask, std::uint32_t yes, std::uint32_t no);
  // Advances `mask` past the masks of a condition that is not evaluated.
  void skip(std::uint32_t id, Masks& mask) const;

  LowerContext& c_;
  BlockBuilder& blocks_;
  ExpressionLowering& expressions_;
  bool isLatch_ = false;
};

}  // namespace qpu::compiler

#endif
