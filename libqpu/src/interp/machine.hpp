// Executes the compact form of a kernel.
//
// The QPUs take turns in the order of their numbers. A QPU's turn ends when the QPU must wait for
// a semaphore, has finished, or has completed its 1000th loop iteration in this turn. The
// interpreter does not switch QPUs at any other time, so a run depends only on the kernel and its
// data.
#ifndef QPU_SRC_INTERP_MACHINE_HPP
#define QPU_SRC_INTERP_MACHINE_HPP

#include <cstddef>
#include <cstdint>

#include "interp/code.hpp"

namespace qpu::interp {

constexpr int kIterationsPerTurn = 1000;

// Throws ExecutionError, or an error derived from it, if the kernel fails.
void run(const Code& code, int qpus, const std::uint32_t* uniforms, std::size_t count);

}  // namespace qpu::interp

#endif
