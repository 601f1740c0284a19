// The operators' user settings.
#ifndef TORCH_QPU_SETTINGS_H
#define TORCH_QPU_SETTINGS_H

namespace torch_qpu {

// The number of QPUs that kernels run on, 1 to 12; 0 means as many as the kernel library
// uses. Throws std::invalid_argument.
void set_qpus(int count);
int qpus();

// Whether the CPU computes operands with Inf or NaN; this requires reading every operand.
void set_finite_only(bool on);
bool is_finite_only();

}  // namespace torch_qpu

#endif
