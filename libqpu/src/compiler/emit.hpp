// Emits machine code for a function whose vectors fit into the registers.
#ifndef QPU_SRC_COMPILER_EMIT_HPP
#define QPU_SRC_COMPILER_EMIT_HPP

#include <optional>

#include "compiler/compile.hpp"

namespace qpu::compiler {

struct Emitted {
  code::Object object;
  double cost = 0;          // of instructions and stalls, weighted by loop depth
  bool hasSpilled = false;  // true also if a vector was rematerialised
};

// Returns nothing if there are not enough registers.
std::optional<Emitted> emitWithoutSpilling(const Function& function, const Options& options);

}  // namespace qpu::compiler

#endif
