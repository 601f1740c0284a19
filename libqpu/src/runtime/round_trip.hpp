// Whether CPU and QPUs see the same memory: one QPU reads what the CPU wrote, and
// the CPU what the QPU writes. This is also the test that settles, on a board,
// which flags and aliases GPU memory needs.
#ifndef QPU_SRC_RUNTIME_ROUND_TRIP_HPP
#define QPU_SRC_RUNTIME_ROUND_TRIP_HPP

#include <vector>

#include "isa/instruction.hpp"
#include "runtime/device.hpp"

namespace qpu::runtime {

std::vector<isa::Word> roundTripProgram();

// Throws BackendError, ExecutionError or AllocationError when it fails.
void roundTrip(Device& device, Method method);

}  // namespace qpu::runtime

#endif
