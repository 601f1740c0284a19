// Runs a kernel's compact form.
//
// Interleaving of the QPUs: they take turns in the order of their numbers. A
// turn ends when the QPU has to wait for a semaphore, has ended, or has closed
// its 1000th loop iteration of the turn. Nothing else switches, so a run
// depends on the kernel and its data alone.
#ifndef QPU_SRC_INTERP_MACHINE_HPP
#define QPU_SRC_INTERP_MACHINE_HPP

#include <cstddef>
#include <cstdint>

#include "interp/code.hpp"

namespace qpu::interp {

constexpr int kIterationsPerTurn = 1000;

// Throws ExecutionError and its kinds.
void run(const Code& code, int qpus, const std::uint32_t* uniforms, std::size_t count);

}  // namespace qpu::interp

#endif
