// Passes on the intermediate representation. The source files cite the publications that describe
// the techniques.
#ifndef QPU_SRC_COMPILER_OPTIMISE_HPP
#define QPU_SRC_COMPILER_OPTIMISE_HPP

#include <cstdint>
#include <vector>

#include "compiler/ir.hpp"

namespace qpu::compiler {

// Replaces each phi whose arguments are all the same value with that value.
void simplifyPhis(ir::Graph& graph);

// Removes the values on which no side effect depends.
void eliminateDeadCode(ir::Graph& graph);

// The stride of a value's elements. If the stride is known, element i equals element 0 plus i *
// step.
struct Stride {
  bool known = false;
  std::uint32_t step = 0;  // 0 if all elements are equal
};
// Returns the strides of all values, indexed by value.
std::vector<Stride> strides(const ir::Graph& graph);

// Lowers loads to requests and receives. `known` contains the strides of the values. If `known` is
// empty, the pass assumes nothing about the loads' addresses.
void lowerLoads(ir::Graph& graph, const std::vector<Stride>& known);

// Rematerialises cheap values at points where more than `limit` values are live at the same time.
void rematerialiseValues(ir::Graph& graph, std::uint32_t limit);

// Loop-invariant code motion: hoists invariant values out of a loop as long as at most `limit`
// values are live in the loop.
void hoistInvariants(ir::Graph& graph, std::uint32_t limit);

// Strength reduction: replaces linear functions of an induction variable, such as addresses, with
// new induction variables.
void reduceStrength(ir::Graph& graph, std::uint32_t limit);

// Constant hoisting: moves the loads of constants that need a register out of the loops that use
// the constants, as long as at most `limit` values are live in the loop.
void hoistConstants(ir::Graph& graph, std::uint32_t limit);

}  // namespace qpu::compiler

#endif
