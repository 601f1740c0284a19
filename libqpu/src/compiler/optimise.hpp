// Passes on the intermediate representation. The files that implement the techniques name their
// sources.
#ifndef QPU_SRC_COMPILER_OPTIMISE_HPP
#define QPU_SRC_COMPILER_OPTIMISE_HPP

#include <cstdint>
#include <vector>

#include "compiler/ir.hpp"

namespace qpu::compiler {

// Replaces each phi whose arguments are all the same value.
void simplifyPhis(ir::Graph& graph);

// Removes values that no effect depends on.
void eliminateDeadCode(ir::Graph& graph);

// The step, if known: element i equals element 0 plus i * step.
struct Stride {
  bool known = false;
  std::uint32_t step = 0;  // 0: all elements are equal
};
// Indexed by value.
std::vector<Stride> strides(const ir::Graph& graph);

// Lowers loads to requests and receives. If `known` is empty, nothing is assumed about the loads'
// addresses.
void lowerLoads(ir::Graph& graph, const std::vector<Stride>& known);

// Rematerialises cheap values where more than `limit` values are live at once.
void rematerialiseValues(ir::Graph& graph, std::uint32_t limit);

// Loop-invariant code motion, as long as at most `limit` values are live in the loop.
void hoistInvariants(ir::Graph& graph, std::uint32_t limit);

// Strength reduction: turns linear functions of an induction variable, such as addresses, into
// induction variables.
void reduceStrength(ir::Graph& graph, std::uint32_t limit);

// Constant hoisting: if a constant needs a register, loads it before the loop that uses it, provided that at most
// `limit` values are live in that loop.
void hoistConstants(ir::Graph& graph, std::uint32_t limit);

}  // namespace qpu::compiler

#endif
