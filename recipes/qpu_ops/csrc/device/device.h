// What the operators need of the device: CPU views of its tensors, and the way
// out for what the QPUs do not compute.
#ifndef TORCH_QPU_DEVICE_H
#define TORCH_QPU_DEVICE_H

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torch_qpu {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }

// A CPU tensor over the same memory; where the CPU must not work there, a copy.
// Other tensors than the device's are returned as they are.
at::Tensor for_cpu(const at::Tensor& t);

// A tensor of the device with the elements of a CPU tensor.
at::Tensor to_device(const at::Tensor& t);

// Throws c10::Error where tensors of the device and of another one, with dimensions, are
// among an operator's arguments.
void require_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Runs the operator's CPU kernel on CPU views of its arguments, and counts that.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace torch_qpu

#endif
