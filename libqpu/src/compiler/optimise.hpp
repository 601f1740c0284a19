// Passes over the middle form.
#ifndef QPU_SRC_COMPILER_OPTIMISE_HPP
#define QPU_SRC_COMPILER_OPTIMISE_HPP

#include <cstdint>
#include <vector>

#include "compiler/ir.hpp"

namespace qpu::compiler {

// Phis of one value become that value.
void simplifyPhis(ir::Graph& graph);

// What no effect depends on goes.
void eliminateDeadCode(ir::Graph& graph);

// Of each value: element i is element 0 + i * stride, where that is known.
struct Stride {
  bool known = false;
  std::uint32_t step = 0;  // 0: all elements are equal
};
std::vector<Stride> strides(const ir::Graph& graph);

// Loads become requests and receives. With `known` empty nothing is assumed of
// their addresses.
void lowerLoads(ir::Graph& graph, const std::vector<Stride>& known);

// Where more than `limit` values are alive at once, cheap ones are computed anew
// for each use, as far as that helps.
void rematerialiseValues(ir::Graph& graph, std::uint32_t limit);

// Values that are the same in every turn of a loop are computed before it, as
// long as no more than `limit` are alive in it.
void hoistInvariants(ir::Graph& graph, std::uint32_t limit);

// Addresses and other sums of a loop's counter become counters of their own.
void reduceStrength(ir::Graph& graph, std::uint32_t limit);

// Constants that need a register get one before the loops that use them, as
// long as no more than `limit` values are alive there.
void placeConstants(ir::Graph& graph, std::uint32_t limit);

}  // namespace qpu::compiler

#endif
