// Builds values of the intermediate representation. The builder also folds constants, simplifies
// operations algebraically and eliminates common subexpressions.
//
// Common subexpressions are found with scoped hash-based value numbering. Reference: Preston
// Briggs, Keith D. Cooper and L. Taylor Simpson, "Value Numbering", 1997.
#ifndef QPU_SRC_COMPILER_IR_BUILDER_HPP
#define QPU_SRC_COMPILER_IR_BUILDER_HPP

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "compiler/ir.hpp"

namespace qpu::compiler {

class IrBuilder {
 public:
  // If `simplify` is false, every value is built exactly as requested.
  IrBuilder(ir::Graph& graph, bool simplify) : graph_(graph), simplify_(simplify) {}

  // Appends new values to the body of the block.
  void at(std::uint32_t block) { block_ = block; }
  std::uint32_t block() const { return block_; }
  void site(std::uint32_t site) { site_ = site; }

  ir::Value constant(std::uint32_t bits);
  ir::Value element();
  ir::Value alu(isa::AddOp op, ir::Value a, ir::Value b);
  ir::Value alu(isa::AddOp op, ir::Value a) { return alu(op, a, a); }
  ir::Value mul(isa::MulOp op, ir::Value a, ir::Value b);
  ir::Value rotate(ir::Value a, ir::Value amount);
  ir::Value broadcast(ir::Value a, std::uint32_t element);
  ir::Value sfu(std::uint32_t function, ir::Value a);
  ir::Value select(ir::Value mask, ir::Value a, ir::Value b);
  ir::Value compare(ir::Test test, ir::Value a, ir::Value b);
  ir::Value maskAnd(ir::Value a, ir::Value b);
  ir::Value maskOr(ir::Value a, ir::Value b);
  ir::Value maskNot(ir::Value a);

  ir::Value load(ir::Value address, std::uint8_t unit);
  ir::Value effect(Op op, ir::Value a = ir::kNone, std::uint32_t bits = 0, std::uint8_t unit = 0);
  // Adds to the block a phi that has no arguments yet.
  ir::Value phi(std::uint32_t block);

  // forget(m) ends the scope that began with m = mark(). Values built in this scope are not reused.
  std::size_t mark() const { return known_.size(); }
  void forget(std::size_t mark);

 private:
  struct Key {
    std::uint64_t operation;
    std::uint64_t operands;
    std::uint64_t rest;
    bool operator==(const Key& o) const {
      return operation == o.operation && operands == o.operands && rest == o.rest;
    }
  };
  struct Hash {
    std::size_t operator()(const Key& k) const {
      std::uint64_t h = k.operation * 0x9e3779b97f4a7c15U;
      h = (h ^ (h >> 29U) ^ k.operands) * 0xbf58476d1ce4e5b9U;
      h = (h ^ (h >> 32U) ^ k.rest) * 0x94d049bb133111ebU;
      return static_cast<std::size_t>(h ^ (h >> 29U));
    }
  };

  const ir::Instruction& of(ir::Value v) const { return graph_.values[v]; }
  ir::Value append(ir::Instruction i);
  ir::Value findOrAppend(const ir::Instruction& i);
  // Returns a constant or an existing value that can replace the operation, or kNone. May
  // exchange a and b.
  ir::Value folded(isa::AddOp op, ir::Value& a, ir::Value& b);
  ir::Value folded(isa::MulOp op, ir::Value& a, ir::Value& b);

  ir::Graph& graph_;
  bool simplify_;
  std::uint32_t block_ = 0;
  std::uint32_t site_ = code::Object::kNoSite;
  std::unordered_map<std::uint32_t, ir::Value> constants_;
  std::unordered_map<Key, ir::Value, Hash> table_;
  std::vector<Key> known_;
};

}  // namespace qpu::compiler

#endif
