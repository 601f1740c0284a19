// Appends machine operations to the current block.
#ifndef QPU_SRC_COMPILER_SELECT_OPERATIONS_HPP
#define QPU_SRC_COMPILER_SELECT_OPERATIONS_HPP

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compiler/ir.hpp"
#include "compiler/mir.hpp"

namespace qpu::compiler {

class OperationWriter {
 public:
  explicit OperationWriter(const ir::Graph& graph)
      : graph_(graph), registers_(static_cast<Vreg>(graph.values.size())) {}

  void beginBlock(std::vector<Operation>& out) {
    out_ = &out;
    constants_.clear();
  }
  void appendTo(std::vector<Operation>& out) { out_ = &out; }
  void site(std::uint32_t site) { site_ = site; }
  Vreg newRegister() { return registers_++; }
  Vreg registers() const { return registers_; }

  Operation& emit(Op op, Vreg target = Operation::kNone);
  Operation& emitAdd(isa::AddOp op, Vreg target, Operand a, Operand b);
  void load(Vreg target, std::uint32_t bits, isa::Cond cond = isa::Cond::Always);
  void move(Vreg target, ir::Value from, isa::Cond cond = isa::Cond::Always);

  // Returns a register that contains v. Constants that cannot be immediates are loaded once per
  // block.
  Operand inRegister(ir::Value v);
  Operand operand(ir::Value v);
  // Returns the two operands of an operation. Only one of them can be an immediate.
  std::pair<Operand, Operand> operands(ir::Value a, ir::Value b);

 private:
  const ir::Graph& graph_;
  Vreg registers_;
  std::vector<Operation>* out_ = nullptr;
  std::uint32_t site_ = code::Object::kNoSite;
  // Registers that hold constants in the current block.
  std::unordered_map<std::uint32_t, Vreg> constants_;
};

}  // namespace qpu::compiler

#endif
