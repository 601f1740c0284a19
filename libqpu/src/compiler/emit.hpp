// Emits machine code for a function whose vectors fit into the registers.
#ifndef QPU_SRC_COMPILER_EMIT_HPP
#define QPU_SRC_COMPILER_EMIT_HPP

#include <optional>

#include "compiler/compile.hpp"

namespace qpu::compiler {

struct Emitted {
  code::Object object;
  // The number of instructions and stalls, weighted by loop depth, under the assumption that 12
  // QPUs start the same DMA transfers at the same time.
  double cost = 0;
  // The time, in instructions, during which the busier of the two DMA engines transfers data for
  // this QPU. The time is computed as if each loop had one iteration.
  int dmaTime = 0;
  bool hasSpilled = false;  // also true if a vector was rematerialised
};

// Returns std::nullopt if there are not enough registers.
std::optional<Emitted> emitWithoutSpilling(const Function& function, const Options& options);

}  // namespace qpu::compiler

#endif
