// Represents masks as flags. Flags are set where a mask is needed, unless they already represent
// it.
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
  // Makes the flags represent the mask. Returns the condition under which it holds.
  isa::Cond setFlagsTo(ir::Value mask);

 private:
  // The mask that the flags represent.
  struct FlagState {
    ir::Value mask = ir::kNone;
    isa::Cond cond = isa::Cond::Always;
    FlagSets sets;
  };

  bool isLeaf(ir::Value mask) const;
  std::optional<FlagSets> sets(ir::Value mask) const;
  // The flags after comparing `first` and then `second`, if one condition represents the combined
  // result.
  std::optional<FlagSets> combined(const ir::Instruction& i, ir::Value first, ir::Value second) const;
  // Sets the flags of the elements for which `cond` holds.
  void setFlags(ir::Value mask, isa::Cond cond);
  static void test(Operation& o, isa::Cond cond);
  // Computes the mask into a register, in which all bits are set where the mask holds.
  void materialise(ir::Value mask);

  const ir::Graph& graph_;
  OperationWriter& out_;
  FlagState flags_;
  std::unordered_map<ir::Value, Vreg> inRegister_;  // masks of the current block
};

}  // namespace qpu::compiler

#endif
