// Represents masks as flags. Before a mask is used, an operation sets the flags, unless the flags
// already represent the mask.
#ifndef QPU_SRC_COMPILER_SELECT_MASKS_HPP
#define QPU_SRC_COMPILER_SELECT_MASKS_HPP

#include <optional>
#include <unordered_map>

#include "compiler/flags.hpp"
#include "compiler/select_operations.hpp"

namespace qpu::compiler {

class MaskSelector {
 public:
  MaskSelector(const ir::Graph& graph, OperationWriter& out) : graph_(graph), out_(out) {}

  void beginBlock() {
    inRegister_.clear();
    flags_ = {};
  }
  // Sets the flags so that they represent the mask. Returns the condition that holds where the
  // mask is true.
  isa::Cond setFlagsTo(ir::Value mask);

 private:
  // The mask that the flags currently represent.
  struct FlagState {
    ir::Value mask = ir::kNone;
    isa::Cond cond = isa::Cond::Always;
    FlagSets sets;
  };

  bool isLeaf(ir::Value mask) const;
  std::optional<FlagSets> sets(ir::Value mask) const;
  // Returns the flags after a comparison with `first`, followed by a comparison with `second`, if
  // a single condition represents the combined result.
  std::optional<FlagSets> combined(const ir::Instruction& i, ir::Value first, ir::Value second) const;
  // Sets flags for the mask in the elements where `cond` holds.
  void setFlags(ir::Value mask, isa::Cond cond);
  static void test(Operation& o, isa::Cond cond);
  // Writes the mask to a register. Where the mask is true, all bits of the register's element are
  // set.
  void materialise(ir::Value mask);

  const ir::Graph& graph_;
  OperationWriter& out_;
  FlagState flags_;
  std::unordered_map<ir::Value, Vreg> inRegister_;  // registers that hold masks of the current block
};

}  // namespace qpu::compiler

#endif
