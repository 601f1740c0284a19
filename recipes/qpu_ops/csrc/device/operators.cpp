// The PyTorch operators that the QPUs compute. These operators support dense float32 tensors on the
// device. Each kernel checks its operands. If a kernel does not support its operands, the CPU
// computes the operator.
#include "operators.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorIterator.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "batches.h"
#include "rows.h"

namespace torch_qpu {

namespace {
std::atomic<int> qpu_count{0};
std::atomic<bool> finite_only{false};
}  // namespace

void set_qpus(int count) {
  if (count < 0 || count > 12)
    throw std::invalid_argument("expected 0 (chosen by the library) to 12 QPUs");
  qpu_count = count;
}
int qpus() { return qpu_count; }
void set_finite_only(bool on) { finite_only = on; }
bool is_finite_only() {
  using torch::autograd::AnomalyMode;
  return finite_only || (AnomalyMode::is_enabled() && AnomalyMode::should_check_nan());
}

bool is_finite(const at::Tensor& t) {
  constexpr std::uint32_t exponent = 0x7f800000;
  const auto* const words = static_cast<const std::uint32_t*>(t.storage().data());
  const std::size_t count = t.storage().nbytes() / sizeof(std::uint32_t);
  return std::none_of(words, words + count,
                      [](std::uint32_t w) { return (w & exponent) == exponent; });
}

namespace {

using at::IntArrayRef;
using at::Tensor;
using kernels::Floats;

// --- element by element --------------------------------------------------------

bool all_arrays(const std::vector<Operand>& in, std::size_t count) {
  return std::all_of(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(count),
                     [](const Operand& o) { return o.data != nullptr; });
}

void run(const Elementwise& what, const std::vector<Operand>& in, float* out, std::int64_t n) {
  std::size_t arrays = 1;
  for (const Operand& operand : in) arrays += operand.data != nullptr ? 1 : 0;
  const int count = static_cast<int>(n);
  launch(what.name, arrays * static_cast<std::size_t>(n) * sizeof(float), [&] {
    if (what.direct != nullptr && what.direct(in, out, count)) return;
    run_chain(what.steps, in, {out}, count, qpu_count);
  });
}

// Returns the number in a CPU scalar, which can exceed the range of float32.
float number_in(const Tensor& t) { return static_cast<float>(t.item<double>()); }

// Returns true for a CPU scalar that is used together with tensors on the device.
bool is_number(const Tensor& t) {
  return t.defined() && t.device().is_cpu() && t.dim() == 0 && !t.is_complex();
}

}  // namespace

bool compute(const Elementwise& what, const std::vector<Tensor>& inputs,
             const std::vector<float>& numbers, const Tensor& out) {
  bool any = false, any_shape = false, plain_numbers = true;
  for (const float number : numbers)
    if (std::isnan(number)) return false;
  for (const Tensor& t : inputs) {
    if (usable(t)) {
      if (t.numel() == 1 && !std::isfinite(*t.const_data_ptr<float>())) return false;
      any = true;
      any_shape = any_shape || t.dim() > 0;
    } else if (is_number(t)) {
      if (!std::isfinite(number_in(t))) return false;
      plain_numbers = plain_numbers && t.unsafeGetTensorImpl()->is_wrapped_number();
    } else {
      return false;
    }
  }
  // PyTorch's type promotion includes scalar tensors only if no tensor has a dimension.
  if (!any || !(plain_numbers || any_shape)) return false;

  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(true).allow_cpu_scalars(true).check_all_same_dtype(false);
  config.add_output(out);
  for (const Tensor& t : inputs) config.add_const_input(t);
  at::TensorIterator iterator = config.build();
  const std::int64_t n = iterator.numel();
  if (n == 0) return true;

  const auto flat_stride = [&](int operand) {
    return iterator.ndim() == 0 || n == 1 ? std::int64_t{sizeof(float)}
                                          : iterator.strides(operand)[0];
  };
  bool flat = iterator.ndim() <= 1 && flat_stride(0) == sizeof(float);
  for (int i = 1; i < iterator.ntensors(); ++i)
    flat = flat && (iterator.is_cpu_scalar(i) || flat_stride(i) == sizeof(float) ||
                    flat_stride(i) == 0);

  std::vector<Operand> operands;
  std::vector<Tensor> kept;  // owns the memory of the operands
  bool any_array = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& t = inputs[i];
    const int place = static_cast<int>(i) + 1;
    if (is_number(t)) {
      operands.push_back({nullptr, number_in(t)});
    } else if (t.numel() == 1 && n > 1 && (any_array || i + 1 < inputs.size())) {
      operands.push_back({nullptr, *t.const_data_ptr<float>()});
    } else if (flat && flat_stride(place) == sizeof(float)) {
      operands.push_back({static_cast<const float*>(iterator.data_ptr(place)), 0});
      any_array = true;
    } else {
      flat = false;
      break;
    }
  }
  if (flat && !any_array) flat = false;
  Tensor target = out;
  if (!flat) {
    operands.clear();
    target = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
    for (const Tensor& t : inputs) {
      if (is_number(t)) {
        operands.push_back({nullptr, number_in(t)});
        continue;
      }
      kept.push_back(dense(t.expand(out.sizes())));
      operands.push_back({kept.back().const_data_ptr<float>(), 0});
    }
  }
  for (const float number : numbers) operands.push_back({nullptr, number});
  float* const to =
      flat ? static_cast<float*>(iterator.data_ptr(0)) : target.mutable_data_ptr<float>();
  run(what, operands, to, n);
  if (!target.is_same(out)) out.copy_(target);
  return true;
}

namespace {

// Arguments: `inputs` tensors, followed by `numbers` numbers, followed by out.
template <const Elementwise& what, std::size_t inputs, std::size_t numbers = 0>
bool elementwise(Call& call) {
  std::vector<Tensor> in;
  for (std::size_t i = 0; i < inputs; ++i) in.push_back(call.tensor(i));
  std::vector<float> more;
  for (std::size_t i = inputs; i < inputs + numbers; ++i) {
    if (!call.is_real(i) || !std::isfinite(call.number(i))) return false;
    more.push_back(call.number(i));
  }
  return compute(what, in, more, call.out());
}

template <void (*kernel)(Floats, Floats, int, int)>
bool one(const std::vector<Operand>& in, float* out, int n) {
  if (!all_arrays(in, 1)) return false;
  kernel(at(out), at(in[0].data), n, qpu_count);
  return true;
}

bool direct_add(const std::vector<Operand>& in, float* out, int n) {
  if (!all_arrays(in, 2)) return false;
  if (in[2].value == 1) kernels::add(at(out), at(in[0].data), at(in[1].data), n, qpu_count);
  else kernels::axpy(at(out), in[2].value, at(in[1].data), at(in[0].data), n, qpu_count);
  return true;
}
bool direct_sub(const std::vector<Operand>& in, float* out, int n) {
  if (!all_arrays(in, 2)) return false;
  if (in[2].value == 1) kernels::sub(at(out), at(in[0].data), at(in[1].data), n, qpu_count);
  else kernels::axpy(at(out), -in[2].value, at(in[1].data), at(in[0].data), n, qpu_count);
  return true;
}
bool direct_mul(const std::vector<Operand>& in, float* out, int n) {
  const bool second = in[1].data != nullptr;
  if (in[0].data != nullptr && second)
    kernels::mul(at(out), at(in[0].data), at(in[1].data), n, qpu_count);
  else
    kernels::scale(at(out), in[second ? 0 : 1].value, at(in[second ? 1 : 0].data), n, qpu_count);
  return true;
}
bool direct_addcmul(const std::vector<Operand>& in, float* out, int n) {
  if (!all_arrays(in, 3) || in[3].value != 1) return false;
  kernels::fma(at(out), at(in[1].data), at(in[2].data), at(in[0].data), n, qpu_count);
  return true;
}
bool direct_clamp(const std::vector<Operand>& in, float* out, int n) {
  if (!all_arrays(in, 1)) return false;
  kernels::clamp(at(out), at(in[0].data), in[1].value, in[2].value, n, qpu_count);
  return true;
}

constexpr Elementwise kAdd{"add", "mul 1 2;add 0 3>4", direct_add};
constexpr Elementwise kSub{"sub", "mul 1 2;sub 0 3>4", direct_sub};
constexpr Elementwise kMul{"mul", "mul 0 1>2", direct_mul};
constexpr Elementwise kDiv{"div", "div 0 1>2"};
constexpr Elementwise kMaximum{"maximum", "max 0 1>2"};
constexpr Elementwise kMinimum{"minimum", "min 0 1>2"};
constexpr Elementwise kAddcmul{"addcmul", "mul 1 2;mul 4 3;add 0 5>6", direct_addcmul};
constexpr Elementwise kAddcdiv{"addcdiv", "div 1 2;mul 4 3;add 0 5>6"};
constexpr Elementwise kExp{"exp", "exp 0>1", one<kernels::exp>};
constexpr Elementwise kLog{"log", "log 0>1"};
constexpr Elementwise kSqrt{"sqrt", "sqrt 0>1", one<kernels::sqrt>};
constexpr Elementwise kRsqrt{"rsqrt", "rsqrt 0>1"};
constexpr Elementwise kReciprocal{"reciprocal", "recip 0>1"};
constexpr Elementwise kNeg{"neg", "neg 0>1"};
constexpr Elementwise kAbs{"abs", "abs 0>1"};
constexpr Elementwise kSigmoid{"sigmoid", "sigmoid 0>1", one<kernels::sigmoid>};
constexpr Elementwise kTanh{"tanh", "tanh 0>1", one<kernels::tanh>};
constexpr Elementwise kRelu{"relu", "relu 0>1", one<kernels::relu>};
constexpr Elementwise kSilu{"silu", "sigmoid 0;mul 0 1;keep 0 2>3"};
constexpr Elementwise kClamp{"clamp", "max 0 1;min 3 2>4", direct_clamp};
constexpr Elementwise kLeakyRelu{"leaky_relu", "mul 0 1;sub 2 2;gt 0 3 0 2>4"};
constexpr Elementwise kSquare{"pow", "mul 0 0>1"};
constexpr Elementwise kCube{"pow", "mul 0 0;mul 0 1>2"};
constexpr Elementwise kSame{"pow", "mul 0 1>2"};
constexpr Elementwise kThresholdBackward{"threshold_backward", "gt 1 2 0 3>4"};
constexpr Elementwise kSigmoidBackward{"sigmoid_backward", "sub 2 1;mul 0 3;mul 4 1>5"};
constexpr Elementwise kTanhBackward{"tanh_backward", "mul 1 1;sub 2 3;mul 0 4>5"};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool clamp(Call& call) {
  const auto bound = [&](std::size_t i, float none) {
    return call[i].isNone() ? none : call.number(i);
  };
  if ((!call[1].isNone() && !call.is_real(1)) || (!call[2].isNone() && !call.is_real(2)))
    return false;
  return compute(kClamp, {call.tensor(0)}, {bound(1, -kInfinity), bound(2, kInfinity)}, call.out());
}
bool clamp_min(Call& call) {
  return call.is_real(1) &&
         compute(kClamp, {call.tensor(0)}, {call.number(1), kInfinity}, call.out());
}
bool clamp_max(Call& call) {
  return call.is_real(1) &&
         compute(kClamp, {call.tensor(0)}, {-kInfinity, call.number(1)}, call.out());
}
// The bounds are tensors. Arguments: self, lower?, upper?.
bool clamp_by_tensors(Call& call) {
  static constexpr Elementwise kBoth{"clamp", "max 0 1;min 3 2>4"};
  if (call[1].isNone()) return compute(kMinimum, {call.tensor(0), call.tensor(2)}, {}, call.out());
  if (call[2].isNone()) return compute(kMaximum, {call.tensor(0), call.tensor(1)}, {}, call.out());
  return compute(kBoth, {call.tensor(0), call.tensor(1), call.tensor(2)}, {}, call.out());
}
bool power(Call& call) {
  if (!call.is_real(1)) return false;
  const double exponent = call[1].toScalar().to<double>();
  const Elementwise* const what = exponent == 2     ? &kSquare
                                  : exponent == 3   ? &kCube
                                  : exponent == 0.5 ? &kSqrt
                                  : exponent == -1  ? &kReciprocal
                                  : exponent == 1   ? &kSame
                                                    : nullptr;
  if (exponent == 0 && usable(call.tensor(0))) {
    at::native::resize_output(call.out(), call.tensor(0).sizes());
    call.out().fill_(1);
    return true;
  }
  if (what == nullptr) return false;
  const std::vector<float> one = exponent == 1 ? std::vector<float>{1} : std::vector<float>{};
  return compute(*what, {call.tensor(0)}, one, call.out());
}
bool threshold_backward(Call& call) {
  return call.is_real(2) && compute(kThresholdBackward, {call.tensor(0), call.tensor(1)},
                                    {call.number(2), 0}, call.out());
}
bool sigmoid_backward(Call& call) {
  return compute(kSigmoidBackward, {call.tensor(0), call.tensor(1)}, {1}, call.out());
}
bool tanh_backward(Call& call) {
  return compute(kTanhBackward, {call.tensor(0), call.tensor(1)}, {1}, call.out());
}
bool relu(Call& call) {
  if (!usable(call.tensor(0))) return false;
  const Tensor out = at::empty_like(call.tensor(0));
  if (!compute(kRelu, {call.tensor(0)}, {}, out)) return false;
  call.finish({out});
  return true;
}
bool relu_(Call& call) {
  const Tensor self = call.tensor(0);
  if (!usable(self) || !compute(kRelu, {self}, {}, self)) return false;
  call.finish({self});
  return true;
}
// Increments an integer tensor with one element, such as the batch counter in batch normalisation.
// As for fill(), the CPU does the work in place, because a launch for a single number would cost
// more than all other work.
bool count_up(Call& call) {
  const Tensor &self = call.tensor(0), &other = call.tensor(1);
  const Tensor out = call.out();
  const auto is_count = [](const Tensor& t) {
    return on_device(t) && t.scalar_type() == at::kLong && t.numel() == 1;
  };
  if (!is_count(self) || !is_count(out) || self.sizes() != out.sizes() || !is_number(other) ||
      other.scalar_type() != at::kLong || !call[2].toScalar().isIntegral(/*includeBool=*/false))
    return false;
  const Span span(Kind::copy, "counter", sizeof(std::int64_t));
  std::int64_t count = 0;
  copy_words(&count, self.const_data_ptr(), sizeof count);
  count += call[2].toScalar().toLong() * other.item<std::int64_t>();
  copy_words(out.mutable_data_ptr(), &count, sizeof count);
  call.finish({out});
  return true;
}
bool add(Call& call) { return count_up(call) || with_out<elementwise<kAdd, 2, 1>>(call); }

// Computes other - alpha * self.
bool rsub(Call& call) {
  const Tensor self = call.tensor(0), other = call.tensor(1);
  if (!usable(self) || !usable(other) || !call.is_real(2) || !std::isfinite(call.number(2)))
    return false;
  const Tensor out = at::empty({0}, self.options());
  if (!compute(kSub, {other, self}, {call.number(2)}, out)) return false;
  call.finish({out});
  return true;
}

// --- matrices ------------------------------------------------------------------

}  // namespace

bool is_matrix(const Tensor& t) {
  for (std::int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) > kMaxFactor || t.stride(i) > kMaxFactor) return false;
  return true;
}

namespace {

kernels::Matrix matrix(const Tensor& t) {
  // If a dimension has only one element, its stride has no meaning and may have any value.
  return {at(t), t.size(0) == 1 ? static_cast<int>(std::max<std::int64_t>(t.size(1), 1))
                                : static_cast<int>(t.stride(0)),
          t.size(1) == 1 ? 1 : static_cast<int>(t.stride(1))};
}

bool is_row_major(const Tensor& t) {
  return (t.size(1) <= 1 || t.stride(1) == 1) &&
         (t.size(0) <= 1 || t.stride(0) >= std::max<std::int64_t>(t.size(1), 1));
}

}  // namespace

void product(const Tensor& c, const Tensor& a, const Tensor& b, float alpha, float beta) {
  if (c.numel() == 0) return;
  if (!is_row_major(c) && is_row_major(c.t())) {
    product(c.t(), b.t(), a.t(), alpha, beta);
    return;
  }
  Tensor to = c;
  if (!is_row_major(c) || c.is_alias_of(a) || c.is_alias_of(b)) {
    to = at::empty(c.sizes(), c.options());
    if (beta != 0) to.copy_(c);
  }
  launch("mm", (a.numel() + b.numel() + c.numel()) * sizeof(float), [&] {
    kernels::matmul(matrix(to), matrix(a), matrix(b), static_cast<int>(c.size(0)),
                    static_cast<int>(c.size(1)), static_cast<int>(a.size(1)), alpha, beta,
                    qpu_count);
  });
  if (!to.is_same(c)) c.copy_(to);
}

namespace {

// Returns true if out can be the product of a and b, which are matrices or batches of matrices.
// An out= form can be called with any shapes. If the shapes do not match, the CPU resizes
// `out` or reports the error.
bool may_multiply(const Tensor& a, const Tensor& b, const Tensor& out, std::int64_t rank) {
  if (!usable(a) || !usable(b) || a.dim() != rank || b.dim() != rank || out.dim() != rank)
    return false;
  if (rank == 3 && (a.size(0) != b.size(0) || a.size(0) != out.size(0))) return false;
  return is_matrix(a) && is_matrix(b) && is_matrix(out) && a.size(-1) == b.size(-2) &&
         out.size(-2) == a.size(-2) && out.size(-1) == b.size(-1);
}

bool mm(Call& call) {
  const Tensor &a = call.tensor(0), &b = call.tensor(1);
  const Tensor out = call.out();
  if (!may_multiply(a, b, out, 2)) return false;
  product(out, a, b, 1, 0);
  return true;
}

bool addmm(Call& call) {
  const Tensor &self = call.tensor(0), &a = call.tensor(1), &b = call.tensor(2);
  const Tensor out = call.out();
  if (!may_multiply(a, b, out, 2) || !usable(self) || !call.is_real(3) || !call.is_real(4))
    return false;
  const float beta = call.number(3), alpha = call.number(4);
  if (!std::isfinite(beta) || !std::isfinite(alpha)) return false;
  if (beta != 0 && !out.is_same(self)) out.copy_(self.expand(out.sizes()));
  product(out, a, b, alpha, beta);
  return true;
}

// If each product has at most this many multiplications, a batch is computed in a single launch.
// Larger products are launched separately.
constexpr std::int64_t kMaxInBatch = std::int64_t{64} * 64 * 64;

bool is_small_batch(const Tensor& out, const Tensor& a, const Tensor& b) {
  return out.size(0) > 1 && out.numel() > 0 && a.size(2) > 0 && out.is_contiguous() &&
         out.size(1) * out.size(2) * a.size(2) <= kMaxInBatch && out.numel() < (1 << 28) &&
         out.size(0) * out.size(1) <= kMaxFactor && !out.is_alias_of(a) && !out.is_alias_of(b);
}

learning::Batch batch_of(const Tensor& t) {
  // If a dimension has only one element, its stride has no meaning.
  const auto step = [&](std::int64_t d) {
    return t.size(d) == 1 ? 0 : static_cast<int>(t.stride(d));
  };
  return {t.const_data_ptr<float>(), step(0), step(1), step(2)};
}

void multiply_batch(const Tensor& out, const Tensor& a, const Tensor& b, float alpha, float beta) {
  if (a.size(2) == 0) {  // the sum has no terms
    beta == 0 ? out.zero_() : out.mul_(beta);
    return;
  }
  if (beta == 0 && is_small_batch(out, a, b)) {
    launch("bmm", (a.numel() + b.numel() + out.numel()) * sizeof(float), [&] {
      learning::multiply(out.mutable_data_ptr<float>(), batch_of(a), batch_of(b),
                         static_cast<int>(out.size(0)), static_cast<int>(out.size(1)),
                         static_cast<int>(out.size(2)), static_cast<int>(a.size(2)), alpha,
                         qpu_count);
    });
    return;
  }
  for (std::int64_t i = 0; i < out.size(0); ++i)
    product(out.select(0, i), a.select(0, i), b.select(0, i), alpha, beta);
}

bool bmm(Call& call) {
  const Tensor &a = call.tensor(0), &b = call.tensor(1);
  const Tensor out = call.out();
  if (!may_multiply(a, b, out, 3)) return false;
  multiply_batch(out, a, b, 1, 0);
  return true;
}

bool baddbmm(Call& call) {
  const Tensor &self = call.tensor(0), &a = call.tensor(1), &b = call.tensor(2);
  const Tensor out = call.out();
  if (!may_multiply(a, b, out, 3) || !usable(self) || !call.is_real(3) || !call.is_real(4))
    return false;
  const float beta = call.number(3), alpha = call.number(4);
  if (!std::isfinite(beta) || !std::isfinite(alpha)) return false;
  if (beta != 0 && !out.is_same(self)) out.copy_(self.expand(out.sizes()));
  multiply_batch(out, a, b, alpha, beta);
  return true;
}

}  // namespace

void product_with_vector(const Tensor& y, const Tensor& a, const Tensor& x) {
  launch("mv", (a.numel() + x.numel() + y.numel()) * sizeof(float), [&] {
    kernels::matvec(at(y), matrix(a), at(x), static_cast<int>(a.size(0)),
                    static_cast<int>(a.size(1)), qpu_count);
  });
}

namespace {

bool addmv(Call& call) {
  const Tensor &self = call.tensor(0), &a = call.tensor(1), &x = call.tensor(2);
  const Tensor out = call.out();
  if (!usable(a) || !usable(x) || a.dim() != 2 || x.dim() != 1 || a.size(1) != x.size(0) ||
      !is_matrix(a) || !call.is_real(3) || !call.is_real(4))
    return false;
  const float beta = call.number(3), alpha = call.number(4);
  if (!std::isfinite(beta) || !std::isfinite(alpha)) return false;
  if ((beta != 0 && !usable(self)) || out.dim() != 1 || out.size(0) != a.size(0)) return false;
  const Tensor y = at::empty({a.size(0)}, out.options());
  product_with_vector(y, a, dense(x));
  if (beta == 0 && alpha == 1) {
    out.copy_(y);
    return true;
  }
  // Computes alpha y + beta self.
  static constexpr Elementwise kJoin{"addmv", "mul 0 2;mul 1 3;add 4 5>6"};
  return compute(kJoin, {y, beta == 0 ? y : self}, {alpha, beta}, out);
}

// Returns true if the result of a reduction is final. The QPUs return Inf where IEEE 754 may
// require NaN, so the CPU recomputes results that are not finite.
bool is_settled(const Tensor& out) { return std::isfinite(*out.const_data_ptr<float>()); }

bool dot(Call& call) {
  const Tensor a = call.tensor(0), b = call.tensor(1);
  if (!usable(a) || !usable(b) || a.dim() != 1 || a.sizes() != b.sizes()) return false;
  const Tensor x = dense(a), y = dense(b);
  const Tensor result = at::empty({}, a.options());
  launch("dot", (x.numel() + y.numel()) * sizeof(float), [&] {
    *result.mutable_data_ptr<float>() =
        kernels::dot(at(x), at(y), static_cast<int>(x.numel()), qpu_count);
  });
  if (!is_settled(result)) return false;
  call.finish({result});
  return true;
}

// --- reductions ----------------------------------------------------------------

// Returns a tensor whose elements can be read in memory order, regardless of the order of the
// dimensions.
Tensor packed(const Tensor& t) { return t.is_non_overlapping_and_dense() ? t : dense(t); }

template <typename Result, typename Run>
void reduce_all(const char* name, const Tensor& t, const Tensor& out, Run run) {
  const Tensor from = packed(t);
  launch(name, from.numel() * sizeof(float), [&] {
    *out.mutable_data_ptr<Result>() = run(at(from), static_cast<int>(from.numel()));
  });
}

// Returns one entry per dimension, which is true if the reduction removes the dimension.
std::vector<bool> reduced(const c10::IValue& dims, std::int64_t rank) {
  std::vector<bool> found(static_cast<std::size_t>(rank), false);
  if (rank == 0) return found;
  if (dims.isNone() || dims.toIntVector().empty()) {
    found.assign(found.size(), true);
    return found;
  }
  for (const std::int64_t d : dims.toIntVector())
    found[static_cast<std::size_t>(at::maybe_wrap_dim(d, rank))] = true;
  return found;
}

// Returns true if the result of a reduction has the right shape. If the shape is wrong, the CPU
// resizes the result.
bool has_shape(const Tensor& out, const Tensor& t, const std::vector<bool>& vanish, bool keep) {
  std::vector<std::int64_t> shape;
  for (std::size_t d = 0; d < vanish.size(); ++d)
    if (!vanish[d] || keep) shape.push_back(vanish[d] ? 1 : t.size(static_cast<std::int64_t>(d)));
  return out.sizes() == IntArrayRef(shape);
}

bool all_of(const std::vector<bool>& v) {
  return std::all_of(v.begin(), v.end(), [](bool b) { return b; });
}

// The errors of matvec() grow with the length of the rows. Up to this length, the errors are within
// the documented bound.
constexpr std::int64_t kLongRow = 8192;

// Computes sums over some dimensions. Sums of short rows are the product of a matrix and a vector
// of ones.
void sum_over(const Tensor& t, const std::vector<bool>& vanish, const Tensor& out) {
  std::vector<std::int64_t> order, kept_sizes;
  std::int64_t rows = 1, columns = 1;
  for (const bool pass : {false, true})
    for (std::size_t d = 0; d < vanish.size(); ++d) {
      if (vanish[d] != pass) continue;
      order.push_back(static_cast<std::int64_t>(d));
      (pass ? columns : rows) *= t.size(static_cast<std::int64_t>(d));
      if (!pass) kept_sizes.push_back(t.size(static_cast<std::int64_t>(d)));
    }
  // The matrix is a view if the strides allow one, and a copy otherwise.
  const Tensor table = t.permute(order).reshape({rows, columns});
  const Tensor from = is_matrix(table) ? table : dense(table);
  const Tensor sums = at::empty({rows}, t.options());
  const kernels::Matrix m = matrix(from);
  const auto kept = static_cast<int>(rows), length = static_cast<int>(columns);
  if (m.columnStride != 1)
    launch("sum", from.numel() * sizeof(float), [&] {
      learning::sum_columns(sums.mutable_data_ptr<float>(), from.const_data_ptr<float>(), length,
                            kept, m.columnStride, m.rowStride, qpu_count);
    });
  else if (columns > kLongRow)
    launch("sum", from.numel() * sizeof(float), [&] {
      learning::sum_long_rows(sums.mutable_data_ptr<float>(), from.const_data_ptr<float>(), kept,
                              length, m.rowStride, qpu_count);
    });
  else
    product_with_vector(sums, from, at::ones({columns}, t.options()));
  out.copy_(sums.view(kept_sizes).view(out.sizes()));
}

bool sums(Call& call, bool mean) {
  const Tensor& t = call.tensor(0);
  const Tensor out = call.out();
  if (!usable(t) || !(call[3].isNone() || call[3].toScalarType() == at::kFloat)) return false;
  if (t.numel() == 0 || out.numel() == 0) return false;
  const std::vector<bool> vanish = reduced(call[1], t.dim());
  if (!has_shape(out, t, vanish, call[2].toBool())) return false;
  std::int64_t rows = 1, columns = 1;
  for (std::size_t d = 0; d < vanish.size(); ++d)
    (vanish[d] ? columns : rows) *= t.size(static_cast<std::int64_t>(d));
  if (all_of(vanish)) {
    reduce_all<float>("sum", t, out,
                      [](Floats from, int n) { return kernels::sum(from, n, qpu_count); });
    if (!is_settled(out)) return false;
  } else {
    if (rows > kMaxFactor || columns > kMaxFactor) return false;
    sum_over(t, vanish, out);
  }
  if (!mean) return true;
  static constexpr Elementwise kDivide{"mean", "div 0 1>2"};
  if (out.numel() == 1) {
    *out.mutable_data_ptr<float>() /= static_cast<float>(columns);
    return true;
  }
  return compute(kDivide, {out}, {static_cast<float>(columns)}, out);
}
bool sum(Call& call) { return sums(call, false); }
bool mean(Call& call) { return sums(call, true); }

float greatest(Floats from, int n) { return kernels::max(from, n, qpu_count); }

bool max(Call& call) {
  const Tensor t = call.tensor(0);
  if (!usable(t) || t.numel() == 0) return false;
  const Tensor out = at::empty({}, t.options());
  reduce_all<float>("max", t, out, greatest);
  call.finish({out});
  return true;
}
bool amax(Call& call) {
  const Tensor& t = call.tensor(0);
  if (!usable(t) || t.numel() == 0) return false;
  const std::vector<bool> vanish = reduced(call[1], t.dim());
  const Tensor out = call.out();
  if (!has_shape(out, t, vanish, call[2].toBool())) return false;
  if (!all_of(vanish)) return extreme_of(call, false);
  reduce_all<float>("max", t, out, greatest);
  return true;
}
bool argmax(Call& call) {
  const Tensor t = call.tensor(0);
  const Tensor out = call.out();
  if (!call[1].isNone()) return place_of_extreme(call, false);
  if (!usable(t) || t.numel() == 0 || out.scalar_type() != at::kLong ||
      !has_shape(out, t, reduced(call[1], t.dim()), call[2].toBool()))
    return false;
  const Tensor from = dense(t);
  launch("argmax", from.numel() * sizeof(float), [&] {
    *out.mutable_data_ptr<std::int64_t>() =
        kernels::argmax(at(from), static_cast<int>(from.numel()), qpu_count);
  });
  call.finish({out});
  return true;
}
bool vector_norm(Call& call) {
  const Tensor& t = call.tensor(0);
  const Tensor out = call.out();
  if (!usable(t) || !call.is_real(1) || call.number(1) != 2 || t.numel() == 0) return false;
  const std::vector<bool> vanish = reduced(call[2], t.dim());
  if (!all_of(vanish) || !has_shape(out, t, vanish, call[3].toBool()) ||
      !(call[4].isNone() || call[4].toScalarType() == at::kFloat))
    return false;
  reduce_all<float>("norm", t, out,
                    [](Floats from, int n) { return kernels::norm(from, n, qpu_count); });
  // Squares below 2^-126 become 0. The CPU recomputes results that this underflow can change by
  // more than one unit in the last place.
  const double least = std::ldexp(std::sqrt(static_cast<double>(t.numel())), -52);
  return is_settled(out) && *out.const_data_ptr<float>() >= least;
}

// --- losses --------------------------------------------------------------------

bool mse_loss(Call& call) {
  static constexpr Elementwise kSquares{"mse_loss", "sub 0 1;mul 2 2>3"};
  const Tensor self = call.tensor(0), target = call.tensor(1);
  if (!usable(self) || !usable(target) || self.sizes() != target.sizes() || self.numel() == 0)
    return false;
  const Tensor squares = at::empty(self.sizes(), self.options());
  if (!compute(kSquares, {self, target}, {}, squares)) return false;
  const std::int64_t reduction = call[2].toInt();
  if (reduction == at::Reduction::None) {
    call.finish({squares});
    return true;
  }
  const Tensor out = at::empty({}, self.options());
  reduce_all<float>("sum", squares, out,
                    [](Floats from, int n) { return kernels::sum(from, n, qpu_count); });
  if (!is_settled(out)) return false;
  if (reduction == at::Reduction::Mean)
    *out.mutable_data_ptr<float>() /= static_cast<float>(self.numel());
  call.finish({out});
  return true;
}

// Arguments: gradient, self, target, reduction.
bool mse_loss_backward(Call& call) {
  static constexpr Elementwise kTimes{"mse_loss_backward", "sub 0 1;mul 4 3;mul 5 2>6"};
  const Tensor gradient = call.tensor(0), self = call.tensor(1), target = call.tensor(2);
  if (!usable(self) || !usable(target) || !usable(gradient) || self.sizes() != target.sizes())
    return false;
  const bool mean = call[3].toInt() == at::Reduction::Mean;
  const float factor = mean ? 2.0F / static_cast<float>(self.numel()) : 2.0F;
  const Tensor out = at::empty(self.sizes(), self.options());
  if (!compute(kTimes, {self, target, gradient}, {factor}, out)) return false;
  call.finish({out});
  return true;
}

// --- chains for torch.compile --------------------------------------------------

std::size_t outputs_of(const std::string& steps) {
  return 1 + static_cast<std::size_t>(std::count(steps.begin(), steps.end(), ','));
}

constexpr const char* kNoArrays = "torch_qpu::chain: expected at least one array";

std::vector<std::int64_t> common_shape(at::TensorList arrays) {
  TORCH_CHECK_VALUE(!arrays.empty(), kNoArrays);
  std::vector<std::int64_t> shape;
  for (const Tensor& t : arrays) shape = at::infer_size(shape, t.sizes());
  return shape;
}

std::vector<Tensor> chain(at::TensorList arrays, at::ArrayRef<double> numbers,
                          std::string kinds, std::string steps) {
  const std::vector<std::int64_t> shape = common_shape(arrays);
  TORCH_CHECK_VALUE(kinds.size() == arrays.size() + numbers.size(),
                    "torch_qpu::chain: kinds '", kinds, "' do not describe ",
                    arrays.size(), " arrays and ", numbers.size(), " numbers");
  std::vector<Tensor> kept;
  for (const Tensor& t : arrays) {
    TORCH_CHECK_TYPE(is_float(t), "torch_qpu::chain: expected float32 on qpu, found ",
                     t.scalar_type(), " on ", t.device());
    kept.push_back(dense(t.expand(shape)));
  }
  std::vector<Operand> operands;
  std::size_t array = 0, number = 0;
  for (const char kind : kinds) {
    TORCH_CHECK_VALUE(kind == 'a' ? array < arrays.size() : number < numbers.size(),
                      "torch_qpu::chain: kinds '", kinds, "' do not match the inputs");
    if (kind == 'a') operands.push_back({kept[array++].const_data_ptr<float>(), 0});
    else operands.push_back({nullptr, static_cast<float>(numbers[number++])});
  }
  std::vector<Tensor> results;
  std::vector<float*> to;
  for (std::size_t i = 0; i < outputs_of(steps); ++i) {
    results.push_back(at::empty(shape, arrays[0].options()));
    to.push_back(results.back().mutable_data_ptr<float>());
  }
  const std::int64_t n = results[0].numel();
  if (n == 0) return results;  // an empty tensor has no address
  launch("chain", (kept.size() + to.size()) * static_cast<std::size_t>(n) * sizeof(float),
         [&] { run_chain(steps, operands, to, static_cast<int>(n), qpu_count); });
  return results;
}

std::vector<Tensor> chain_shapes(at::TensorList arrays, at::ArrayRef<double> /*numbers*/,
                                 std::string /*kinds*/, std::string steps) {
  TORCH_CHECK_VALUE(!arrays.empty(), kNoArrays);
  at::SymDimVector shape;
  for (const Tensor& t : arrays) shape = at::infer_size_symdimvector(shape, t.sym_sizes());
  std::vector<Tensor> results;
  for (std::size_t i = 0; i < outputs_of(steps); ++i)
    results.push_back(at::empty_symint(shape, arrays[0].options()));
  return results;
}

// torch.compile traces gradients before it fuses operators. A chain that is called directly must
// not silently lose the gradients.
void chain_of_leaves(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call(op, *stack);
  for (const Tensor& t : call[0].toTensorVector())
    TORCH_CHECK(!at::GradMode::is_enabled() || !t.requires_grad(),
                "torch_qpu::chain has no gradient: detach() its arrays, or use "
                "torch.compile(backend='qpu'), which traces gradients before it fuses");
  const at::AutoDispatchBelowAutograd below;
  op.callBoxed(stack);
}

// On the device, the operators torch.ops.qpu.* are PyTorch's own operators.
Tensor plain_add(const Tensor& a, const Tensor& b) { return at::add(a, b); }
Tensor plain_mul(const Tensor& a, const Tensor& b) { return at::mul(a, b); }
Tensor plain_mv(const Tensor& a, const Tensor& b) { return at::mv(a, b); }
Tensor plain_mm(const Tensor& a, const Tensor& b) { return at::mm(a, b); }

TORCH_LIBRARY_IMPL(qpu, PrivateUse1, m) {
  m.impl("add", &plain_add);
  m.impl("mul", &plain_mul);
  m.impl("mv", &plain_mv);
  m.impl("mm", &plain_mm);
}

TORCH_LIBRARY_IMPL(torch_qpu, PrivateUse1, m) { m.impl("chain", &chain); }
TORCH_LIBRARY_IMPL(torch_qpu, Meta, m) { m.impl("chain", &chain_shapes); }
TORCH_LIBRARY_IMPL(torch_qpu, AutogradPrivateUse1, m) {
  m.impl("chain", torch::CppFunction::makeFromBoxedFunction<&chain_of_leaves>());
}

// PyTorch derives the in-place form and the functional form of a structured operator from its
// out= form.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("add.out", kernel<add>());
  m.impl("sub.out", out_kernel<elementwise<kSub, 2, 1>>());
  m.impl("mul.out", out_kernel<elementwise<kMul, 2>>());
  m.impl("div.out", out_kernel<elementwise<kDiv, 2>>());
  m.impl("maximum.out", out_kernel<elementwise<kMaximum, 2>>());
  m.impl("minimum.out", out_kernel<elementwise<kMinimum, 2>>());
  m.impl("addcmul.out", out_kernel<elementwise<kAddcmul, 3, 1>>());
  m.impl("addcdiv.out", out_kernel<elementwise<kAddcdiv, 3, 1>>());
  m.impl("exp.out", out_kernel<elementwise<kExp, 1>>());
  m.impl("log.out", out_kernel<elementwise<kLog, 1>>());
  m.impl("sqrt.out", out_kernel<elementwise<kSqrt, 1>>());
  m.impl("rsqrt.out", out_kernel<elementwise<kRsqrt, 1>>());
  m.impl("reciprocal.out", out_kernel<elementwise<kReciprocal, 1>>());
  m.impl("neg.out", out_kernel<elementwise<kNeg, 1>>());
  m.impl("abs.out", out_kernel<elementwise<kAbs, 1>>());
  m.impl("sigmoid.out", out_kernel<elementwise<kSigmoid, 1>>());
  m.impl("tanh.out", out_kernel<elementwise<kTanh, 1>>());
  m.impl("silu.out", out_kernel<elementwise<kSilu, 1>>());
  m.impl("leaky_relu.out", out_kernel<elementwise<kLeakyRelu, 1, 1>>());
  m.impl("clamp.out", out_kernel<clamp>());
  m.impl("clamp_min.out", out_kernel<clamp_min>());
  m.impl("clamp_max.out", out_kernel<clamp_max>());
  m.impl("clamp.Tensor_out", out_kernel<clamp_by_tensors>());
  m.impl("clamp_min.Tensor_out", out_kernel<elementwise<kMaximum, 2>>());
  m.impl("clamp_max.Tensor_out", out_kernel<elementwise<kMinimum, 2>>());
  m.impl("pow.Tensor_Scalar_out", out_kernel<power>());
  m.impl("threshold_backward.grad_input", out_kernel<threshold_backward>());
  m.impl("sigmoid_backward.grad_input", out_kernel<sigmoid_backward>());
  m.impl("tanh_backward.grad_input", out_kernel<tanh_backward>());
  m.impl("relu", kernel<relu>());
  m.impl("relu_", kernel<relu_>());
  m.impl("rsub.Tensor", kernel<rsub>());

  m.impl("mm.out", out_kernel<mm>());
  m.impl("addmm.out", out_kernel<addmm>());
  m.impl("bmm.out", out_kernel<bmm>());
  m.impl("baddbmm.out", out_kernel<baddbmm>());
  m.impl("addmv.out", out_kernel<addmv>());
  m.impl("dot", kernel<dot>());

  m.impl("sum.IntList_out", out_kernel<sum>());
  m.impl("mean.out", out_kernel<mean>());
  m.impl("max", kernel<max>());
  m.impl("amax.out", out_kernel<amax>());
  m.impl("argmax.out", kernel<argmax>());
  m.impl("linalg_vector_norm.out", out_kernel<vector_norm>());

  m.impl("mse_loss", kernel<mse_loss>());
  m.impl("mse_loss_backward", kernel<mse_loss_backward>());
}

}  // namespace
}  // namespace torch_qpu
