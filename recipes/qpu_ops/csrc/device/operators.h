// Code that the operators share: wrappers with which PyTorch's dispatcher calls functions that
// check their operands and launch QPU kernels.
#ifndef TORCH_QPU_OPERATORS_H
#define TORCH_QPU_OPERATORS_H

#include <ATen/record_function.h>
#include <qpu/error.h>
#include <qpu/kernels.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chains.h"
#include "device.h"
#include "memory.h"
#include "settings.h"
#include "trace.h"

namespace torch_qpu {

namespace kernels = qpu::kernels;

// Sizes and strides that kernels multiply must fit in 24 bits.
constexpr std::int64_t kMaxFactor = (1 << 24) - 1;

inline kernels::Floats at(const float* p) { return const_cast<float*>(p); }
inline kernels::Floats at(const at::Tensor& t) { return at(t.const_data_ptr<float>()); }
inline const float* data(const std::optional<at::Tensor>& t) {
  return t.has_value() ? t->const_data_ptr<float>() : nullptr;
}

// Runs a kernel. Only one kernel runs at a time. `bytes` is the number of bytes that the kernel
// reads and writes. Throws c10::OutOfMemoryError if no memory is left for the kernel's own data.
template <typename Run>
void launch(const char* name, std::size_t bytes, Run run) {
  // Records the kernel for torch.profiler.
  at::RecordFunction shown(at::RecordScope::FUNCTION);
  const std::string title = shown.isActive() ? std::string("qpu::") + name : std::string();
  if (shown.isActive()) shown.before(title.c_str());
  const Span span(Kind::launch, name, bytes);
  const std::lock_guard<std::mutex> lock(device_mutex());
  try {
    run();
  } catch (const OutOfMemory& fault) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, fault.what());
  } catch (const qpu::AllocationError& fault) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, fault.what());
  }
}

// Returns true if no element is Inf or NaN. The function checks the whole range of the tensor in
// its storage, including the memory between the elements.
bool is_finite(const at::Tensor& t);

inline bool is_float(const at::Tensor& t) {
  return on_device(t) && t.scalar_type() == at::kFloat &&
         t.numel() < std::numeric_limits<int>::max();
}
// Returns true if the QPUs can read the tensor.
inline bool usable(const at::Tensor& t) {
  return is_float(t) && (!is_finite_only() || is_finite(t));
}

inline at::Tensor dense(const at::Tensor& t) { return t.contiguous(); }

inline std::optional<at::Tensor> optional(const c10::IValue& value) {
  if (value.isNone() || !value.toTensor().defined()) return std::nullopt;
  return value.toTensor();
}

// The arguments of an operator on the stack, which the operator's result replaces.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : stack_(stack), count_(op.schema().arguments().size()) {}

  const c10::IValue& operator[](std::size_t i) const { return stack_[stack_.size() - count_ + i]; }
  const at::Tensor& tensor(std::size_t i) const { return (*this)[i].toTensor(); }
  float number(std::size_t i) const { return (*this)[i].toScalar().to<float>(); }
  bool is_real(std::size_t i) const {
    return (*this)[i].isScalar() && !(*this)[i].toScalar().isComplex();
  }
  // Returns the last argument of an out= form.
  at::Tensor out() const { return tensor(count_ - 1); }

  void finish(std::vector<c10::IValue> results) {
    torch::jit::drop(stack_, count_);
    for (c10::IValue& result : results) stack_.push_back(std::move(result));
  }

 private:
  torch::jit::Stack& stack_;
  std::size_t count_;
};

// A kernel for the dispatcher. `body` returns false if the QPUs cannot compute the result. The CPU
// then computes the result.
template <bool (*body)(Call&)>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  require_one_device(op, *stack);
  Call call(op, *stack);
  if (!body(call)) fall_back(op, stack);
}
// A kernel for an out= form.
template <bool (*body)(Call&)>
bool with_out(Call& call) {
  const at::Tensor out = call.out();
  if (!is_float(out) || !body(call)) return false;
  call.finish({out});
  return true;
}

template <bool (*body)(Call&)>
torch::CppFunction kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&boxed<body>>();
}
template <bool (*body)(Call&)>
torch::CppFunction out_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&boxed<&with_out<body>>>();
}

// A libqpu kernel that replaces a chain if the inputs meet the requirements of this kernel.
using Direct = bool (*)(const std::vector<Operand>& in, float* out, int n);

// A chain of operations on the same elements.
struct Elementwise {
  const char* name;
  const char* steps;
  Direct direct = nullptr;
};

// Computes a chain. The inputs are tensors, which are broadcast, and then numbers. If `out`
// has no shape, it is resized to the common shape of the inputs. Returns false if the QPUs cannot
// compute the chain.
bool compute(const Elementwise& what, const std::vector<at::Tensor>& inputs,
             const std::vector<float>& numbers, const at::Tensor& out);

// The forms of argmax and amax that have a dimension argument. These forms are defined in
// layers.cpp.
bool place_of_extreme(Call& call, bool least);
bool extreme_of(Call& call, bool least);

// Returns true if the tensor is a matrix whose sizes and strides fit in 24 bits.
bool is_matrix(const at::Tensor& t);
// Computes c = alpha a b + beta c for matrices.
void product(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b, float alpha,
             float beta);
// Computes y = a x. Both vectors must be dense.
void product_with_vector(const at::Tensor& y, const at::Tensor& a, const at::Tensor& x);

}  // namespace torch_qpu

#endif
