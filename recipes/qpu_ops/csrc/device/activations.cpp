// Activations and interpolation on the QPUs, with their gradients. Each function is a chain of
// elementwise operations. In the numbering of a chain's inputs, tensors precede numbers.
#include "operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <initializer_list>

namespace torch_qpu {
namespace {

using at::Tensor;

// Returns the numbers among the arguments, or std::nullopt if one of them is complex or not finite.
std::optional<std::vector<float>> numbers(const Call& call,
                                          std::initializer_list<std::size_t> places) {
  std::vector<float> found;
  for (const std::size_t place : places) {
    if (!call.is_real(place) || !std::isfinite(call.number(place))) return std::nullopt;
    found.push_back(call.number(place));
  }
  return found;
}

bool compute_with(const Elementwise& what, const std::vector<Tensor>& inputs,
                  std::optional<std::vector<float>> given, std::initializer_list<float> more,
                  const Tensor& out) {
  if (!given.has_value()) return false;
  given->insert(given->end(), more);
  return compute(what, inputs, *given, out);
}

// Adapters that make a functional operator and an in-place operator from the body of an out=
// form.
template <bool (*body)(Call&, const Tensor& out)>
bool with_last(Call& call) {
  return body(call, call.out());
}
template <bool (*body)(Call&, const Tensor& out)>
bool functional(Call& call) {
  if (!usable(call.tensor(0))) return false;
  const Tensor out = at::empty({0}, call.tensor(0).options());
  if (!body(call, out)) return false;
  call.finish({out});
  return true;
}
template <bool (*body)(Call&, const Tensor& out)>
bool in_place(Call& call) {
  const Tensor self = call.tensor(0);
  if (!usable(self) || !body(call, self)) return false;
  call.finish({self});
  return true;
}

// --- gelu ----------------------------------------------------------------------

constexpr float kRootOf2OverPi = 0.79788456F;
constexpr float kCubic = 0.044715F;
constexpr float kRootOf1Over2Pi = 0.39894228F;

// Computes x cdf(x).
constexpr Elementwise kGelu{"gelu", "cdf 0;mul 0 1;keep 0 2>3"};
// Computes x / 2 (1 + tanh(root (x + cubic x^3))). Numbers: root, cubic, half, one.
constexpr Elementwise kGeluTanh{
    "gelu", "mul 0 0;mul 5 0;mul 6 2;add 0 7;mul 8 1;tanh 9;add 10 4;mul 0 3;mul 12 11;"
            "keep 0 13>14"};
// Computes g (cdf(x) + x density(x)). Numbers: -half, root of 1 / (2 pi).
constexpr Elementwise kGeluBackward{
    "gelu_backward", "cdf 1;mul 1 1;mul 5 2;exp 6;mul 7 3;mul 8 1;add 4 9;mul 0 10>11"};
// Computes g (1 + t + x (1 - t^2) root (1 + 3 cubic x^2)) / 2, where t is the tanh. Numbers:
// root, cubic, half, one, 3 cubic.
constexpr Elementwise kGeluTanhBackward{
    "gelu_backward",
    "mul 1 1;mul 7 1;mul 8 3;add 1 9;mul 10 2;tanh 11;"      // value 12 is t
    "mul 12 12;sub 5 13;mul 7 6;add 15 5;mul 16 2;mul 14 17;mul 18 1;"  // value 19 is x t'
    "add 12 5;add 20 19;mul 21 4;mul 0 22;keep 1 23>24"};

bool is_tanh(const c10::IValue& approximate) { return approximate.toStringRef() == "tanh"; }

bool gelu(Call& call) {
  if (is_tanh(call[1]))
    return compute(kGeluTanh, {call.tensor(0)}, {kRootOf2OverPi, kCubic, 0.5F, 1}, call.out());
  return compute(kGelu, {call.tensor(0)}, {}, call.out());
}
bool gelu_backward(Call& call) {
  const std::vector<Tensor> inputs{call.tensor(0), call.tensor(1)};
  if (is_tanh(call[2]))
    return compute(kGeluTanhBackward, inputs, {kRootOf2OverPi, kCubic, 0.5F, 1, 3 * kCubic},
                   call.out());
  return compute(kGeluBackward, inputs, {-0.5F, kRootOf1Over2Pi}, call.out());
}

// --- piecewise linear functions ------------------------------------------------

constexpr Elementwise kHardtanh{"hardtanh", "max 0 1;min 3 2>4"};
// The gradient is 0 at each bound and beyond it. Numbers: low, high, 0.
constexpr Elementwise kHardtanhBackward{"hardtanh_backward", "gt 1 2 0 4;gt 3 1 5 4>6"};
constexpr Elementwise kLeakyReluBackward{"leaky_relu_backward", "mul 0 2;gt 1 3 0 4>5"};
// Computes clamp(x / 6 + 1 / 2, 0, 1). Numbers: 3, 0, 6, 1 / 6.
constexpr Elementwise kHardsigmoid{"hardsigmoid", "add 0 1;max 5 2;min 6 3;mul 7 4;keep 0 8>9"};
// Numbers: 3, -3, 0, 1 / 6.
constexpr Elementwise kHardsigmoidBackward{"hardsigmoid_backward",
                                           "mul 0 5;gt 1 3 6 4;gt 2 1 7 4>8"};
constexpr Elementwise kHardswish{"hardswish",
                                "add 0 1;max 5 2;min 6 3;mul 7 4;mul 0 8;keep 0 9>10"};
// Computes g (x / 3 + 1 / 2) between the bounds. Numbers: 3, -3, 0, 1 / 3, 1 / 2.
constexpr Elementwise kHardswishBackward{
    "hardswish_backward", "mul 1 5;add 7 6;mul 0 8;gt 1 3 9 4;gt 2 1 10 0>11"};

bool hardtanh(Call& call, const Tensor& out) {
  return compute_with(kHardtanh, {call.tensor(0)}, numbers(call, {1, 2}), {}, out);
}
bool hardtanh_backward(Call& call, const Tensor& out) {
  return compute_with(kHardtanhBackward, {call.tensor(0), call.tensor(1)}, numbers(call, {2, 3}),
                      {0}, out);
}
bool leaky_relu_backward(Call& call) {
  return compute_with(kLeakyReluBackward, {call.tensor(0), call.tensor(1)}, numbers(call, {2}), {0},
                      call.out());
}
bool hardsigmoid(Call& call) {
  return compute(kHardsigmoid, {call.tensor(0)}, {3, 0, 6, 1.0F / 6}, call.out());
}
bool hardsigmoid_backward(Call& call) {
  return compute(kHardsigmoidBackward, {call.tensor(0), call.tensor(1)}, {3, -3, 0, 1.0F / 6},
                 call.out());
}
bool hardswish(Call& call, const Tensor& out) {
  return compute(kHardswish, {call.tensor(0)}, {3, 0, 6, 1.0F / 6}, out);
}
bool hardswish_backward(Call& call, const Tensor& out) {
  return compute(kHardswishBackward, {call.tensor(0), call.tensor(1)}, {3, -3, 0, 1.0F / 3, 0.5F},
                 out);
}

// --- exponentials --------------------------------------------------------------

constexpr Elementwise kExpm1{"expm1", "expm1 0>1"};
// Numbers: scale, input_scale, alpha scale, 0.
constexpr Elementwise kElu{"elu", "mul 0 2;expm1 5;mul 6 3;mul 0 1;gt 0 4 8 7;keep 0 9>10"};
// Computes g input_scale (y + alpha scale) from the result y. The numbers are the same as those of
// kElu.
constexpr Elementwise kEluBackwardOfResult{"elu_backward",
                                           "add 1 4;mul 6 3;mul 7 0;mul 0 2;gt 1 5 9 8>10"};
// Computes g input_scale alpha scale exp(x input_scale) from the input x.
constexpr Elementwise kEluBackward{"elu_backward",
                                   "mul 1 3;exp 6;mul 7 3;mul 8 4;mul 9 0;mul 0 2;gt 1 5 11 10>12"};
// Computes (max(z, 0) + log(1 + exp(-|z|))) / beta. Numbers: beta, 1 / beta, threshold.
constexpr Elementwise kSoftplus{
    "softplus", "mul 0 1;abs 4;neg 5;exp 6;log1p 7;relu 4;add 9 8;mul 10 2;gt 4 3 0 11;"
                "keep 0 12>13"};
constexpr Elementwise kSoftplusBackward{"softplus_backward",
                                        "mul 1 2;sigmoid 4;mul 0 5;gt 4 3 0 6;keep 1 7>8"};
// Computes g s (1 + x (1 - s)), where s is the sigmoid of x. The factor 1 - s is computed as
// exp(-x) s. The difference would not approach 0 for large x, because QPUs round towards zero.
constexpr Elementwise kSiluBackward{
    "silu_backward", "neg 1;exp 3;add 2 4;recip 5;mul 4 6;mul 1 7;add 2 8;mul 6 9;mul 0 10;"
                     "keep 1 11>12"};

bool expm1(Call& call) { return compute(kExpm1, {call.tensor(0)}, {}, call.out()); }

// Returns the numbers that the chains expect, which are derived from alpha, scale and
// input_scale.
std::optional<std::vector<float>> elu_numbers(const Call& call, std::size_t first) {
  const auto given = numbers(call, {first, first + 1, first + 2});
  if (!given.has_value()) return std::nullopt;
  const std::vector<float>& v = *given;
  return std::vector<float>{v[1], v[2], v[0] * v[1]};
}
bool elu(Call& call) {
  return compute_with(kElu, {call.tensor(0)}, elu_numbers(call, 1), {0}, call.out());
}
// Arguments: gradient, alpha, scale, input_scale, is_result, self or result, out.
bool elu_backward(Call& call) {
  return compute_with(call[4].toBool() ? kEluBackwardOfResult : kEluBackward,
                      {call.tensor(0), call.tensor(5)}, elu_numbers(call, 1), {0}, call.out());
}
bool softplus(Call& call) {
  const auto given = numbers(call, {1, 2});
  if (!given.has_value()) return false;
  const float beta = (*given)[0], threshold = (*given)[1];
  return compute(kSoftplus, {call.tensor(0)}, {beta, 1 / beta, threshold}, call.out());
}
bool softplus_backward(Call& call) {
  return compute_with(kSoftplusBackward, {call.tensor(0), call.tensor(1)}, numbers(call, {2, 3}),
                      {}, call.out());
}
bool silu_backward(Call& call, const Tensor& out) {
  return compute(kSiluBackward, {call.tensor(0), call.tensor(1)}, {1}, out);
}

// --- interpolation -------------------------------------------------------------

// As in PyTorch, the interpolation starts from the first operand if the weight is below one half,
// and from the second operand otherwise.
constexpr Elementwise kLerp{"lerp", "sub 1 0;mul 3 2;add 0 4>5"};
constexpr Elementwise kLerpFromEnd{"lerp", "sub 1 0;sub 3 2;mul 4 5;sub 1 6>7"};
constexpr Elementwise kLerpByTensor{
    "lerp", "sub 1 0;mul 5 2;add 0 6;sub 4 2;mul 5 8;sub 1 9;abs 2;gt 3 11 7 10>12"};

bool lerp(Call& call) {
  const auto given = numbers(call, {2});
  if (!given.has_value()) return false;
  const float weight = (*given)[0];
  const std::vector<Tensor> ends{call.tensor(0), call.tensor(1)};
  if (weight < 0.5F && weight > -0.5F) return compute(kLerp, ends, {weight}, call.out());
  return compute(kLerpFromEnd, ends, {weight, 1}, call.out());
}
bool lerp_by_tensor(Call& call) {
  return compute(kLerpByTensor, {call.tensor(0), call.tensor(1), call.tensor(2)}, {0.5F, 1},
                 call.out());
}

// PyTorch derives the other forms of a structured operator from its out= form.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("gelu.out", out_kernel<gelu>());
  m.impl("gelu_backward.grad_input", out_kernel<gelu_backward>());
  m.impl("hardtanh.out", out_kernel<with_last<hardtanh>>());
  m.impl("hardtanh", kernel<functional<hardtanh>>());
  m.impl("hardtanh_", kernel<in_place<hardtanh>>());
  m.impl("hardtanh_backward.grad_input", out_kernel<with_last<hardtanh_backward>>());
  m.impl("hardtanh_backward", kernel<functional<hardtanh_backward>>());
  m.impl("leaky_relu_backward.grad_input", out_kernel<leaky_relu_backward>());
  m.impl("hardsigmoid.out", out_kernel<hardsigmoid>());
  m.impl("hardsigmoid_backward.grad_input", out_kernel<hardsigmoid_backward>());
  m.impl("hardswish.out", out_kernel<with_last<hardswish>>());
  m.impl("hardswish", kernel<functional<hardswish>>());
  m.impl("hardswish_", kernel<in_place<hardswish>>());
  m.impl("hardswish_backward", kernel<functional<hardswish_backward>>());
  m.impl("expm1.out", out_kernel<expm1>());
  m.impl("elu.out", out_kernel<elu>());
  m.impl("elu_backward.grad_input", out_kernel<elu_backward>());
  m.impl("softplus.out", out_kernel<softplus>());
  m.impl("softplus_backward.grad_input", out_kernel<softplus_backward>());
  m.impl("silu_backward.grad_input", out_kernel<with_last<silu_backward>>());
  m.impl("silu_backward", kernel<functional<silu_backward>>());
  m.impl("lerp.Scalar_out", out_kernel<lerp>());
  m.impl("lerp.Tensor_out", out_kernel<lerp_by_tensor>());
}

}  // namespace
}  // namespace torch_qpu
