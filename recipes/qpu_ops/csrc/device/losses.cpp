// Softmax, log-softmax and the classification loss on the QPUs, with their gradients.
#include "operators.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/empty.h>

#include "learning.h"

namespace torch_qpu {
namespace {

using at::Tensor;

// A tensor that is viewed as rows along one of its dimensions.
class Rows {
 public:
  Rows(const Tensor& t, std::int64_t dim)
      : dim_(t.dim() == 0 ? 0 : at::maybe_wrap_dim(dim, t.dim())),
        data_(dense(t.dim() == 0 ? t.view({1}) : t.movedim(dim_, -1))) {}

  int columns() const { return static_cast<int>(data_.size(-1)); }
  int count() const { return static_cast<int>(data_.numel() / data_.size(-1)); }
  bool are_plain() const { return count() <= kMaxFactor && columns() <= kMaxFactor; }
  const Tensor& data() const { return data_; }

  // Returns the tensor to which a result with the shape of `out` must be written before finish()
  // is called.
  Tensor target(const Tensor& out) const {
    return is_direct(out) ? out : at::empty(data_.sizes(), data_.options());
  }
  void finish(const Tensor& out, const Tensor& made) const {
    if (is_direct(out)) return;
    out.copy_(out.dim() == 0 ? made.view({}) : made.movedim(-1, dim_));
  }

 private:
  bool is_direct(const Tensor& out) const {
    return out.is_contiguous() && dim_ + 1 >= out.dim();
  }

  std::int64_t dim_;
  Tensor data_;
};

// Arguments: self, dimension, half to float, out.
template <bool of_log>
bool softmax(Call& call) {
  const Tensor& t = call.tensor(0);
  const Tensor out = call.out();
  if (!usable(t) || call[2].toBool() || t.sizes() != out.sizes()) return false;
  if (t.numel() == 0) return true;
  const Rows rows(t, call[1].toInt());
  if (!rows.are_plain()) return false;
  const Tensor& from = rows.data();
  const Tensor to = rows.target(out);
  launch(of_log ? "log_softmax" : "softmax", 2 * from.numel() * sizeof(float), [&] {
    if (of_log)
      learning::log_softmax(to.mutable_data_ptr<float>(), from.const_data_ptr<float>(),
                            rows.count(), rows.columns(), qpus());
    else
      kernels::softmax(at(to), at(from), rows.count(), rows.columns(), rows.columns(), qpus());
  });
  rows.finish(out, to);
  return true;
}

// Arguments: gradient, result, dimension, dtype of the input, out.
template <bool of_log>
bool softmax_backward(Call& call) {
  const Tensor &gradient = call.tensor(0), &result = call.tensor(1);
  const Tensor out = call.out();
  if (!usable(gradient) || !usable(result) || call[3].toScalarType() != at::kFloat ||
      gradient.sizes() != result.sizes() || out.sizes() != result.sizes())
    return false;
  if (result.numel() == 0) return true;
  const Rows gradients(gradient, call[2].toInt()), results(result, call[2].toInt());
  if (!results.are_plain()) return false;
  const Tensor to = results.target(out);
  launch(of_log ? "log_softmax_backward" : "softmax_backward", 3 * out.numel() * sizeof(float),
         [&] {
           (of_log ? learning::log_softmax_backward : learning::softmax_backward)(
               to.mutable_data_ptr<float>(), gradients.data().const_data_ptr<float>(),
               results.data().const_data_ptr<float>(), results.count(), results.columns(), qpus());
         });
  results.finish(out, to);
  return true;
}

// Returns the classes of a tensor [rows][classes], or std::nullopt if the QPUs do not support them.
std::optional<learning::Classes> classes(const Tensor& self, const Tensor& target,
                                         const std::optional<Tensor>& weight,
                                         std::int64_t ignored) {
  if (!usable(self) || self.dim() != 2 || self.numel() == 0 || self.size(0) > kMaxFactor ||
      self.size(1) > kMaxFactor || !on_device(target) || target.scalar_type() != at::kLong ||
      target.dim() != 1 || target.size(0) != self.size(0) || !target.is_contiguous())
    return std::nullopt;
  if (weight.has_value() && (!usable(*weight) || weight->dim() != 1 ||
                             weight->size(0) != self.size(1) || !weight->is_contiguous()))
    return std::nullopt;
  learning::Classes found;
  found.targets = target.const_data_ptr<std::int64_t>();
  found.ignored = ignored;
  found.weights = weight.has_value() ? weight->const_data_ptr<float>() : nullptr;
  found.rows = static_cast<int>(self.size(0));
  found.classes = static_cast<int>(self.size(1));
  return found;
}

[[noreturn]] void refuse_targets(const learning::Classes& of) {
  for (int row = 0; row < of.rows; ++row) {
    const std::int64_t target = of.targets[row];
    TORCH_CHECK_INDEX(target == of.ignored || (target >= 0 && target < of.classes), "Target ",
                      target, " is out of bounds.");
  }
  TORCH_CHECK_INDEX(false, "a target was out of bounds, but has been changed in the meantime");
}

// Arguments: self, target, weight?, reduction, ignored, out, total weight.
bool nll_loss(Call& call) {
  const Tensor self = call.tensor(0), target = call.tensor(1);
  const std::optional<Tensor> weight = optional(call[2]);
  const std::int64_t reduction = call[3].toInt();
  const Tensor out = call.tensor(5), total = call.tensor(6);
  const auto of = classes(self, target, weight, call[4].toInt());
  const bool each = reduction == at::Reduction::None;
  if (!of.has_value() || !is_float(out) || !is_float(total) || total.dim() != 0 ||
      !out.is_contiguous() || (each ? out.sizes() != target.sizes() : out.dim() != 0))
    return false;
  const Tensor from = dense(self);
  const Tensor losses = each ? out : at::empty({self.size(0)}, self.options());
  learning::Loss found;
  launch("nll_loss", 2 * losses.numel() * sizeof(float) + target.nbytes(), [&] {
    found = learning::nll(losses.mutable_data_ptr<float>(), from.const_data_ptr<float>(), *of,
                          qpus());
  });
  if (found.any_unknown) refuse_targets(*of);
  if (!each)
    *out.mutable_data_ptr<float>() = static_cast<float>(
        reduction == at::Reduction::Mean ? found.sum / found.weight : found.sum);
  *total.mutable_data_ptr<float>() = each ? 0 : static_cast<float>(found.weight);
  call.finish({out, total});
  return true;
}

// Arguments: gradient, self, target, weight?, reduction, ignored, total weight, out.
bool nll_loss_backward(Call& call) {
  const Tensor& gradient = call.tensor(0);
  const Tensor& self = call.tensor(1);
  const Tensor& target = call.tensor(2);
  const Tensor& total = call.tensor(6);
  const Tensor out = call.out();
  const std::optional<Tensor> weight = optional(call[3]);
  const std::int64_t reduction = call[4].toInt();
  const auto of = classes(self, target, weight, call[5].toInt());
  const bool each = reduction == at::Reduction::None;
  if (!of.has_value() || !usable(gradient) || !is_float(total) || total.numel() != 1 ||
      out.sizes() != self.sizes() || !out.is_contiguous() ||
      (each ? gradient.sizes() != target.sizes() : gradient.numel() != 1))
    return false;
  const Tensor from = dense(gradient);
  const float factor =
      reduction == at::Reduction::Mean ? -1 / *total.const_data_ptr<float>() : -1.0F;
  launch("nll_loss_backward", out.numel() * sizeof(float) + target.nbytes(), [&] {
    learning::nll_backward(out.mutable_data_ptr<float>(), from.const_data_ptr<float>(), !each,
                           factor, *of, qpus());
  });
  return true;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_softmax.out", out_kernel<softmax<false>>());
  m.impl("_softmax_backward_data.out", out_kernel<softmax_backward<false>>());
  m.impl("_log_softmax.out", out_kernel<softmax<true>>());
  m.impl("_log_softmax_backward_data.out", out_kernel<softmax_backward<true>>());
  m.impl("nll_loss_forward.output", kernel<nll_loss>());
  m.impl("nll_loss_backward.grad_input", out_kernel<nll_loss_backward>());
}

}  // namespace
}  // namespace torch_qpu
