// The settings of the operators that users can change.
#ifndef TORCH_QPU_SETTINGS_H
#define TORCH_QPU_SETTINGS_H

namespace torch_qpu {

// The number of QPUs that run kernels, 1 to 12. 0 means that the kernel library chooses the
// number. set_qpus() throws std::invalid_argument if the number is out of range.
void set_qpus(int count);
int qpus();

// If this setting is on, the CPU computes operators whose operands contain Inf or NaN. The
// check must read every operand.
void set_finite_only(bool on);
bool is_finite_only();

}  // namespace torch_qpu

#endif
