// Lowers expressions to values.
#ifndef QPU_SRC_COMPILER_LOWER_EXPRESSIONS_HPP
#define QPU_SRC_COMPILER_LOWER_EXPRESSIONS_HPP

#include <cstdint>
#include <vector>

#include "compiler/lower_memory.hpp"

namespace qpu::compiler {

class ExpressionLowering {
 public:
  ExpressionLowering(LowerContext& context, MemoryLowering& memory)
      : c_(context), memory_(memory), computedIn_(context.source.expressions.size(), 0),
        valueOf_(context.source.expressions.size(), ir::kNone) {}

  // Each expression is evaluated only once per statement.
  void beginStatement(const detail::Statement& s) {
    statement_ = &s;
    ++serial_;
  }
  ir::Value evaluate(std::uint32_t id);

 private:
  ir::Value compute(const detail::Expression& e);
  ir::Value alu(isa::AddOp op, const detail::Expression& e);
  ir::Value aluOfOne(isa::AddOp op, const detail::Expression& e);
  ir::Value mul(isa::MulOp op, const detail::Expression& e);
  // If `swap` is true, compares the second operand with the first.
  ir::Value compare(ir::Test test, const detail::Expression& e, bool swap, bool negate);
  ir::Value differ(const detail::Expression& e);

  LowerContext& c_;
  MemoryLowering& memory_;
  const detail::Statement* statement_ = nullptr;
  std::uint32_t serial_ = 0;
  // Indexed by expression: serial number of the last statement that evaluated the expression.
  std::vector<std::uint32_t> computedIn_;
  std::vector<ir::Value> valueOf_;
};

}  // namespace qpu::compiler

#endif
