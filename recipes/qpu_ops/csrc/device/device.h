// Device functions that the operators use: CPU views of tensors, and the fallback for operators
// that the QPUs do not compute.
#ifndef TORCH_QPU_DEVICE_H
#define TORCH_QPU_DEVICE_H

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torch_qpu {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }

// Returns a CPU tensor that shares the memory of t, or a copy of t if the CPU must not work in
// that memory. If t is on another device, returns t.
at::Tensor for_cpu(const at::Tensor& t);

// Returns a device tensor that contains the elements of a CPU tensor.
at::Tensor to_device(const at::Tensor& t);

// Throws c10::Error if an operator's arguments include tensors on this device and tensors on
// another device. Zero-dimensional tensors may be on any device.
void require_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Runs the operator's CPU kernel on CPU views of the arguments, and counts the call as a
// fallback.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace torch_qpu

#endif
