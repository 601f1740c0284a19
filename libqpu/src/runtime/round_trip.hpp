// Tests whether the CPU and the QPUs access the same memory: a QPU reads data that the CPU wrote,
// and the CPU reads data that the QPU wrote. On a board, this test also determines the flags and
// the alias that GPU memory requires.
#ifndef QPU_SRC_RUNTIME_ROUND_TRIP_HPP
#define QPU_SRC_RUNTIME_ROUND_TRIP_HPP

#include <vector>

#include "isa/instruction.hpp"
#include "runtime/device.hpp"

namespace qpu::runtime {

std::vector<isa::Word> roundTripProgram();

// Throws BackendError, ExecutionError or AllocationError if the test fails.
void roundTrip(Device& device, Method method);

}  // namespace qpu::runtime

#endif
