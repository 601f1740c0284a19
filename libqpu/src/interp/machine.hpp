// Runs a kernel's compact form.
//
// QPUs are interleaved round-robin in the order of their numbers. A QPU's turn ends when it has
// to wait for a semaphore, has finished, or has completed its 1000th loop iteration in this turn.
// There are no other switches, so a run depends only on the kernel and its data.
#ifndef QPU_SRC_INTERP_MACHINE_HPP
#define QPU_SRC_INTERP_MACHINE_HPP

#include <cstddef>
#include <cstdint>

#include "interp/code.hpp"

namespace qpu::interp {

constexpr int kIterationsPerTurn = 1000;

// Throws ExecutionError or a derived class.
void run(const Code& code, int qpus, const std::uint32_t* uniforms, std::size_t count);

}  // namespace qpu::interp

#endif
