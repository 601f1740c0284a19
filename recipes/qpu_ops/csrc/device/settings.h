// What a user may set of the operators.
#ifndef TORCH_QPU_SETTINGS_H
#define TORCH_QPU_SETTINGS_H

namespace torch_qpu {

// QPUs that kernels run on, 1 to 12; 0: as many as the kernel library takes. Throws
// std::invalid_argument.
void set_qpus(int count);
int qpus();

// Whether operands with Inf or NaN go to the CPU, for which every operand is read.
void set_finite_only(bool on);
bool is_finite_only();

}  // namespace torch_qpu

#endif
