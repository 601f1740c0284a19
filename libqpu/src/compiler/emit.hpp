// Machine code for a function whose vectors fit into the registers.
#ifndef QPU_SRC_COMPILER_EMIT_HPP
#define QPU_SRC_COMPILER_EMIT_HPP

#include <optional>

#include "compiler/compile.hpp"

namespace qpu::compiler {

struct Emitted {
  code::Object object;
  double cost = 0;          // instructions and stalls, weighted by loop depth
  bool hasSpilled = false;  // or rematerialised
};

// Returns nothing if there are not enough registers.
std::optional<Emitted> emitWithoutSpilling(const Function& function, const Options& options);

}  // namespace qpu::compiler

#endif
