// Concatenation, lookup, comparison and selection on the QPUs.
#include "operators.h"

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>

#include "moves.h"

namespace torch_qpu {
namespace {

using at::Tensor;

// --- concatenation -------------------------------------------------------------

// Arguments: tensors, dimension, out. The tensors may include empty tensors with one dimension.
bool cat(Call& call) {
  const Tensor out = call.out();
  std::vector<Tensor> parts;
  for (const Tensor& t : call[0].toTensorVector()) {
    if (t.dim() == 1 && t.size(0) == 0) continue;
    if (!usable(t)) return false;
    parts.push_back(t);
  }
  if (parts.empty() || parts[0].dim() == 0) return false;
  const std::int64_t dim = at::maybe_wrap_dim(call[1].toInt(), parts[0].dim());
  std::vector<std::int64_t> sizes = parts[0].sizes().vec();
  const auto width = static_cast<std::size_t>(dim);
  sizes[width] = 0;
  for (const Tensor& t : parts) {
    if (t.dim() != parts[0].dim()) return false;
    for (std::int64_t d = 0; d < t.dim(); ++d)
      if (d != dim && t.size(d) != parts[0].size(d)) return false;
    sizes[width] += t.size(dim);
  }
  at::native::resize_output(out, sizes);
  if (!out.is_contiguous()) return false;
  if (out.numel() == 0) return true;
  for (const Tensor& t : parts) at::assert_no_overlap(out, t);
  const auto elements_after = [dim](const Tensor& t) {
    std::int64_t n = 1;
    for (std::int64_t d = dim + 1; d < t.dim(); ++d) n *= t.size(d);
    return n;
  };
  const std::int64_t inner = elements_after(out), row = inner * out.size(dim);
  if (row > std::numeric_limits<int>::max()) return false;
  const auto rows = static_cast<std::size_t>(out.numel() / row);
  // With a single row, there is only one run per tensor.
  if (rows > 1 && !learning::has_small_table(rows * parts.size(), out.nbytes())) return false;
  std::vector<learning::Run> runs;
  std::int64_t before = 0;
  for (Tensor& t : parts) {
    t = dense(t);
    const std::int64_t length = t.size(dim) * inner;
    if (length == 0) continue;
    for (std::int64_t i = 0; i < out.numel() / row; ++i)
      runs.push_back({out.mutable_data_ptr<float>() + i * row + before,
                      t.const_data_ptr<float>() + i * length, static_cast<int>(length)});
    before += length;
  }
  launch("cat", 2 * out.nbytes(), [&] { learning::copy_runs(runs, qpus()); });
  return true;
}

// --- lookup --------------------------------------------------------------------

// Copies integers from the device to the CPU. Returns std::nullopt if the dtype is not an integer
// type.
std::optional<std::vector<std::int64_t>> whole_numbers(const Tensor& t) {
  if (!on_device(t) || (t.scalar_type() != at::kLong && t.scalar_type() != at::kInt))
    return std::nullopt;
  const Tensor from = dense(t);
  const auto count = static_cast<std::size_t>(from.numel());
  std::vector<std::int64_t> found(count);
  if (t.scalar_type() == at::kLong) {
    copy_words(found.data(), from.const_data_ptr(), from.nbytes());
  } else {
    std::vector<std::int32_t> narrow(count);
    copy_words(narrow.data(), from.const_data_ptr(), from.nbytes());
    std::copy(narrow.begin(), narrow.end(), found.begin());
  }
  return found;
}

// Selects rows of the first dimension. embedding() also uses this operator. Arguments: self,
// dimension, index.
bool index_select(Call& call) {
  const Tensor self = call.tensor(0), index = call.tensor(2);
  if (!usable(self) || self.dim() == 0 || index.dim() != 1 || self.numel() == 0 ||
      at::maybe_wrap_dim(call[1].toInt(), self.dim()) != 0)
    return false;
  const std::int64_t columns = self.numel() / self.size(0);
  const auto count = static_cast<std::size_t>(index.numel());
  const std::size_t bytes = count * static_cast<std::size_t>(columns) * sizeof(float);
  // The CPU would copy the whole source.
  if (!learning::has_small_table(count, std::max(bytes, self.nbytes() / 2))) return false;
  const auto rows = whole_numbers(index);
  if (!rows.has_value() || columns > std::numeric_limits<int>::max()) return false;
  for (const std::int64_t row : *rows)
    TORCH_CHECK_INDEX(row >= 0 && row < self.size(0), "index out of range in self: expected 0 to ",
                      self.size(0) - 1, ", found ", row);
  const Tensor from = dense(self);
  std::vector<std::int64_t> sizes = self.sizes().vec();
  sizes[0] = index.size(0);
  const Tensor out = at::empty(sizes, self.options());
  std::vector<learning::Run> runs;
  auto* to = out.mutable_data_ptr<float>();
  for (const std::int64_t row : *rows) {
    runs.push_back({to, from.const_data_ptr<float>() + row * columns, static_cast<int>(columns)});
    to += columns;
  }
  if (out.numel() != 0)
    launch("index_select", 2 * out.nbytes(), [&] { learning::copy_runs(runs, qpus()); });
  call.finish({out});
  return true;
}

// Arguments: gradient, indices, number of rows, padding row, scale by frequency.
bool embedding_backward(Call& call) {
  const Tensor gradient = call.tensor(0), indices = call.tensor(1);
  const std::int64_t rows = call[2].toInt(), padding = call[3].toInt();
  if (!usable(gradient) || gradient.dim() == 0 || gradient.numel() == 0 || call[4].toBool() ||
      rows > kMaxFactor || gradient.size(-1) > kMaxFactor)
    return false;
  const auto looked_up = whole_numbers(indices);
  const std::int64_t columns = gradient.size(-1);
  if (!looked_up.has_value() || indices.numel() > kMaxFactor ||
      gradient.numel() != indices.numel() * columns)
    return false;
  std::vector<std::vector<int>> places(static_cast<std::size_t>(rows));
  int place = 0;
  for (const std::int64_t row : *looked_up) {
    TORCH_CHECK_INDEX(row >= 0 && row < rows, "index out of range in self: expected 0 to ",
                      rows - 1, ", found ", row);
    if (row != padding) places[static_cast<std::size_t>(row)].push_back(place);
    ++place;
  }
  const Tensor from = dense(gradient);
  const Tensor out = at::empty({rows, columns}, gradient.options());
  launch("embedding_backward", from.nbytes() + out.nbytes(), [&] {
    learning::sum_rows(out.mutable_data_ptr<float>(), from.const_data_ptr<float>(), places,
                       static_cast<int>(columns), qpus());
  });
  call.finish({out});
  return true;
}

// --- comparison and selection --------------------------------------------------

bool is_bool(const Tensor& t) { return on_device(t) && t.scalar_type() == at::kBool; }

bool is_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 4 == 0; }

// Returns true if kernels may write whole words of a tensor of bytes.
bool has_whole_words(const Tensor& t) {
  if (!t.is_contiguous() || !is_aligned(t.const_data_ptr())) return false;
  const std::size_t end = static_cast<std::size_t>(t.storage_offset()) + t.nbytes();
  // The size of an allocation is a multiple of the word size.
  return t.nbytes() % 4 == 0 || end == t.storage().nbytes();
}

// The operands in shared memory, both tensors and numbers.
class Operands {
 public:
  explicit Operands(at::IntArrayRef shape, const Tensor& like) : shape_(shape), like_(like) {}

  // Returns false if the QPUs cannot read the tensor.
  bool add(const Tensor& t) {
    if (t.numel() == 1 && (usable(t) || is_cpu_number(t))) return add(t.item<float>());
    if (!usable(t)) return false;
    kept_.push_back(dense(t.expand(shape_)));
    found_.push_back({kept_.back().const_data_ptr<float>(), false});
    return true;
  }
  bool add(float number) {
    kept_.push_back(at::scalar_tensor(number, like_.options().dtype(at::kFloat)));
    found_.push_back({kept_.back().const_data_ptr<float>(), true});
    return true;
  }
  const learning::Compared& operator[](std::size_t i) const { return found_[i]; }

 private:
  static bool is_cpu_number(const Tensor& t) {
    return t.device().is_cpu() && t.dim() == 0 && t.unsafeGetTensorImpl()->is_wrapped_number() &&
           !t.is_complex();
  }

  at::IntArrayRef shape_;
  const Tensor& like_;
  std::vector<Tensor> kept_;
  std::vector<learning::Compared> found_;
};

bool store_comparison(const char* name, learning::Comparison what, const learning::Compared& a,
                      const learning::Compared& b, const Tensor& out) {
  if (out.numel() == 0) return true;
  const Tensor to = has_whole_words(out) ? out : at::empty(out.sizes(), out.options());
  launch(name, 2 * sizeof(float) * static_cast<std::size_t>(out.numel()) + out.nbytes(), [&] {
    learning::compare(what, to.mutable_data_ptr(), a, b, static_cast<int>(out.numel()), qpus());
  });
  if (!to.is_same(out)) out.copy_(to);
  return true;
}

// Arguments: self, other, out. If `swapped` is true, compares other with self.
template <learning::Comparison what, bool swapped = false>
bool compare_tensors(Call& call) {
  const Tensor &self = call.tensor(0), &other = call.tensor(1);
  const Tensor out = call.out();
  // PyTorch's type promotion can ignore tensors without dimensions, which has no effect because all
  // tensors are float32.
  if (!is_float(self) || !is_float(other) || !is_bool(out) ||
      out.numel() >= std::numeric_limits<int>::max() ||
      out.sizes() != at::IntArrayRef(at::infer_size(self.sizes(), other.sizes())))
    return false;
  Operands in(out.sizes(), self);
  if (!in.add(swapped ? other : self) || !in.add(swapped ? self : other)) return false;
  if (!store_comparison("compare", what, in[0], in[1], out)) return false;
  call.finish({out});
  return true;
}
template <learning::Comparison what, bool swapped = false>
bool compare_number(Call& call) {
  const Tensor& self = call.tensor(0);
  const Tensor out = call.out();
  if (!is_float(self) || !call.is_real(1) || !is_bool(out) || out.sizes() != self.sizes())
    return false;
  const auto number = static_cast<float>(call[1].toScalar().to<double>());
  Operands in(out.sizes(), self);
  const auto add_number = [&] { return in.add(number); };
  if (swapped ? !add_number() || !in.add(self) : !in.add(self) || !add_number()) return false;
  if (!store_comparison("compare", what, in[0], in[1], out)) return false;
  call.finish({out});
  return true;
}

bool store_choice(const Tensor& condition, const learning::Compared& a,
                  const learning::Compared& b, const Tensor& out, const char* name = "where",
                  float factor = 1) {
  if (out.numel() == 0) return true;
  Tensor flags = dense(condition.expand(out.sizes()));
  if (!is_aligned(flags.const_data_ptr())) flags = flags.clone();
  const Tensor to = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  launch(name, 3 * out.nbytes() + flags.nbytes(), [&] {
    learning::choose(to.mutable_data_ptr<float>(), flags.const_data_ptr(), a, factor, b,
                     static_cast<int>(out.numel()), qpus());
  });
  if (!to.is_same(out)) out.copy_(to);
  return true;
}

// Returns true if where() with these two tensors has a float32 result.
bool are_floats(const Tensor& a, const Tensor& b) {
  const auto is_number = [](const Tensor& t) { return t.dim() == 0 && !t.is_complex(); };
  return (is_float(a) && (is_float(b) || (is_number(b) && a.dim() > 0))) ||
         (is_float(b) && is_number(a) && b.dim() > 0);
}

// Arguments: condition, self, other.
bool where_to(const Call& call, const Tensor& out) {
  const Tensor &condition = call.tensor(0), &self = call.tensor(1), &other = call.tensor(2);
  Operands in(out.sizes(), condition);
  return in.add(self) && in.add(other) && store_choice(condition, in[0], in[1], out);
}
std::vector<std::int64_t> where_shape(const Call& call) {
  return at::infer_size(call.tensor(0).sizes(),
                        at::infer_size(call.tensor(1).sizes(), call.tensor(2).sizes()));
}
bool may_choose(const Call& call) {
  return is_bool(call.tensor(0)) && are_floats(call.tensor(1), call.tensor(2));
}
bool where(Call& call) {
  if (!may_choose(call)) return false;
  const Tensor out = at::empty(where_shape(call), call.tensor(0).options().dtype(at::kFloat));
  if (!is_float(out) || !where_to(call, out)) return false;
  call.finish({out});
  return true;
}
bool where_out(Call& call) {
  const Tensor out = call.out();
  if (!may_choose(call) || out.sizes() != at::IntArrayRef(where_shape(call)) ||
      out.is_alias_of(call.tensor(1)) || out.is_alias_of(call.tensor(2)))
    return false;
  return where_to(call, out);
}

// Arguments: self, mask, value. The operator works in place.
template <bool of_tensor>
bool masked_fill_(Call& call) {
  const Tensor self = call.tensor(0), condition = call.tensor(1);
  if (!usable(self) || !is_bool(condition) || !self.is_contiguous() ||
      !at::is_expandable_to(condition.sizes(), self.sizes()))
    return false;
  Operands in(self.sizes(), self);
  if (of_tensor) {
    const Tensor& value = call.tensor(2);
    if (value.dim() != 0 || value.is_complex() || !in.add(value.item<float>())) return false;
  } else if (!call.is_real(2) || !in.add(call.number(2))) {
    return false;
  }
  if (!in.add(self) || !store_choice(condition, in[0], in[1], self)) return false;
  call.finish({self});
  return true;
}

// --- dropout -------------------------------------------------------------------

// Sets `out` to the input multiplied by the factor where the mask is set, and to 0 elsewhere.
bool drop(const Tensor& input, const Tensor& mask, double factor, const Tensor& out) {
  Operands in(input.sizes(), input);
  return in.add(input) && in.add(0.0F) &&
         store_choice(mask, in[0], in[1], out, "dropout", static_cast<float>(factor));
}

// Arguments: input, p, train?. The CPU generates the mask, as it generates all random numbers.
bool native_dropout(Call& call) {
  const Tensor input = call.tensor(0);
  const double p = call[1].toDouble();
  if (!usable(input) || input.numel() < 2 || !(p > 0 && p < 1) ||
      !(call[2].isNone() || call[2].toBool()))
    return false;
  const Tensor mask = to_device(
      at::empty(input.sizes(), at::TensorOptions().dtype(at::kBool)).bernoulli_(1 - p));
  const Tensor out = at::empty(input.sizes(), input.options());
  drop(input, mask, 1 / (1 - p), out);
  call.finish({out, mask});
  return true;
}
// Arguments: gradient, mask, scale.
bool native_dropout_backward(Call& call) {
  const Tensor gradient = call.tensor(0), mask = call.tensor(1);
  if (!usable(gradient) || gradient.numel() < 2 || !is_bool(mask) ||
      mask.sizes() != gradient.sizes())
    return false;
  const Tensor out = at::empty(gradient.sizes(), gradient.options());
  drop(gradient, mask, call[2].toDouble(), out);
  call.finish({out});
  return true;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using learning::Comparison;
  m.impl("cat.out", out_kernel<cat>());
  m.impl("index_select", kernel<index_select>());
  m.impl("embedding_dense_backward", kernel<embedding_backward>());

  m.impl("gt.Tensor_out", kernel<compare_tensors<Comparison::greater>>());
  m.impl("ge.Tensor_out", kernel<compare_tensors<Comparison::greater_or_equal>>());
  m.impl("lt.Tensor_out", kernel<compare_tensors<Comparison::greater, true>>());
  m.impl("le.Tensor_out", kernel<compare_tensors<Comparison::greater_or_equal, true>>());
  m.impl("eq.Tensor_out", kernel<compare_tensors<Comparison::equal>>());
  m.impl("ne.Tensor_out", kernel<compare_tensors<Comparison::not_equal>>());
  m.impl("gt.Scalar_out", kernel<compare_number<Comparison::greater>>());
  m.impl("ge.Scalar_out", kernel<compare_number<Comparison::greater_or_equal>>());
  m.impl("lt.Scalar_out", kernel<compare_number<Comparison::greater, true>>());
  m.impl("le.Scalar_out", kernel<compare_number<Comparison::greater_or_equal, true>>());
  m.impl("eq.Scalar_out", kernel<compare_number<Comparison::equal>>());
  m.impl("ne.Scalar_out", kernel<compare_number<Comparison::not_equal>>());

  m.impl("where.self", kernel<where>());
  m.impl("where.self_out", out_kernel<where_out>());
  m.impl("masked_fill_.Scalar", kernel<masked_fill_<false>>());
  m.impl("masked_fill_.Tensor", kernel<masked_fill_<true>>());
  m.impl("native_dropout", kernel<native_dropout>());
  m.impl("native_dropout_backward", kernel<native_dropout_backward>());
}

}  // namespace
}  // namespace torch_qpu
