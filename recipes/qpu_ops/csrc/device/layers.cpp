// Layer normalisation, pooling over regions, and minimum and maximum along a dimension on the QPUs.
#include "operators.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>

#include "regions.h"
#include "rows.h"

namespace torch_qpu {
namespace {

using at::Tensor;

// --- layer normalisation -------------------------------------------------------

// The number of rows and columns of an input that is normalised over its last dimensions. The
// number of rows is 0 if the kernels do not support the input.
struct Normalised {
  std::int64_t rows = 0;
  std::int64_t columns = 1;
  std::vector<std::int64_t> statistics;  // the shape of the mean and of the reciprocal deviation

  Normalised(const Tensor& input, at::IntArrayRef shape) {
    const auto kept = input.dim() - static_cast<std::int64_t>(shape.size());
    if (!usable(input) || input.numel() == 0 || shape.empty() || kept < 0 ||
        input.sizes().slice(static_cast<std::size_t>(kept)) != shape)
      return;
    for (const std::int64_t size : shape) columns *= size;
    if (columns > kMaxFactor || input.numel() / columns > kMaxFactor) return;
    rows = input.numel() / columns;
    statistics = input.sizes().vec();
    std::fill(statistics.begin() + kept, statistics.end(), 1);
  }
  // Returns true if an optional tensor is absent or has one number per column.
  bool takes(const std::optional<Tensor>& t) const {
    return !t.has_value() || (usable(*t) && t->numel() == columns && t->is_contiguous());
  }
};

// Arguments: input, shape, weight?, bias?, epsilon.
bool layer_norm(Call& call) {
  const Tensor input = call.tensor(0);
  const std::optional<Tensor> weight = optional(call[2]), bias = optional(call[3]);
  const Normalised of(input, call[1].toIntVector());
  if (of.rows == 0 || !of.takes(weight) || !of.takes(bias)) return false;
  const Tensor from = dense(input);
  const Tensor out = at::empty(from.sizes(), from.options());
  const Tensor mean = at::empty(of.statistics, from.options());
  const Tensor spread = at::empty(of.statistics, from.options());
  learning::LayerNorm norm;
  norm.out = out.mutable_data_ptr<float>();
  norm.mean = mean.mutable_data_ptr<float>();
  norm.spread = spread.mutable_data_ptr<float>();
  norm.a = from.const_data_ptr<float>();
  norm.weight = data(weight);
  norm.bias = data(bias);
  norm.epsilon = static_cast<float>(call[4].toDouble());
  norm.rows = static_cast<int>(of.rows);
  norm.columns = static_cast<int>(of.columns);
  launch("layer_norm", 2 * from.nbytes(), [&] { learning::layer_norm(norm, qpus()); });
  call.finish({out, mean, spread});
  return true;
}

// Arguments: gradient, input, shape, mean, reciprocal deviation, weight?, bias?, wanted.
bool layer_norm_backward(Call& call) {
  const Tensor gradient = call.tensor(0), input = call.tensor(1);
  const Tensor mean = call.tensor(3), spread = call.tensor(4);
  const std::optional<Tensor> weight = optional(call[5]), bias = optional(call[6]);
  const std::vector<bool> wanted = call[7].toBoolList().vec();
  const Normalised of(input, call[2].toIntVector());
  if (of.rows == 0 || !of.takes(weight) || !usable(gradient) ||
      gradient.sizes() != input.sizes() || !usable(mean) || !usable(spread) ||
      mean.numel() != of.rows || spread.numel() != of.rows || (wanted[2] && !of.takes(bias)))
    return false;
  const Tensor x = dense(input), g = dense(gradient);
  const Tensor means = dense(mean), spreads = dense(spread);
  const auto made = [&](bool want, at::IntArrayRef sizes) {
    return want ? at::empty(sizes, x.options()) : Tensor();
  };
  const Tensor of_input = made(wanted[0], x.sizes());
  const Tensor of_weight =
      made(wanted[1] && weight.has_value(), weight.has_value() ? weight->sizes() : x.sizes());
  const Tensor of_bias =
      made(wanted[2] && bias.has_value(), bias.has_value() ? bias->sizes() : x.sizes());
  const auto to = [](const Tensor& t) {
    return t.defined() ? t.mutable_data_ptr<float>() : nullptr;
  };
  learning::LayerNormGradient norm;
  norm.of_a = to(of_input);
  norm.of_weight = to(of_weight);
  norm.of_bias = to(of_bias);
  norm.gradient = g.const_data_ptr<float>();
  norm.a = x.const_data_ptr<float>();
  norm.mean = means.const_data_ptr<float>();
  norm.spread = spreads.const_data_ptr<float>();
  norm.weight = data(weight);
  norm.rows = static_cast<int>(of.rows);
  norm.columns = static_cast<int>(of.columns);
  launch("layer_norm_backward", 3 * x.nbytes(),
         [&] { learning::layer_norm_backward(norm, qpus()); });
  call.finish({of_input, of_weight, of_bias});
  return true;
}

// Computes the softmax, but returns 0 for rows that contain only -Inf. In other rows, the result
// for an element that is -Inf is also 0.
Tensor safe_softmax(const Tensor& self, std::int64_t dim, std::optional<at::ScalarType> dtype) {
  static constexpr Elementwise kWhereFinite{"safe_softmax", "gt 0 2 1 3>4"};
  const Tensor from = dtype.has_value() ? self.to(*dtype) : self;
  Tensor result = at::_softmax(from, dim, /*half_to_float=*/false);
  constexpr float least = -std::numeric_limits<float>::infinity();
  if (!compute(kWhereFinite, {from, result}, {least, 0}, result))
    result.masked_fill_(from.eq(least), 0);
  return result;
}

// --- pooling -------------------------------------------------------------------

// The range [first, end) of each region along an axis.
using Spans = std::vector<std::array<int, 2>>;

Spans adaptive_spans(std::int64_t in, std::int64_t out) {
  Spans found;
  for (std::int64_t i = 0; i < out; ++i)
    found.push_back({static_cast<int>(i * in / out),
                     static_cast<int>(((i + 1) * in + out - 1) / out)});
  return found;
}

// Returns the regions that contain each element. The regions are consecutive.
Spans covering(const Spans& spans, std::int64_t in) {
  Spans found;
  for (int i = 0; i < in; ++i) {
    const auto holds = [i](const std::array<int, 2>& s) { return s[0] <= i && i < s[1]; };
    const auto first = std::find_if(spans.begin(), spans.end(), holds);
    const auto end = std::find_if_not(first, spans.end(), holds);
    found.push_back({static_cast<int>(first - spans.begin()),
                     static_cast<int>(end - spans.begin())});
  }
  return found;
}

learning::Regions regions(const Spans& rows, const Spans& columns, std::int64_t height,
                          std::int64_t width) {
  learning::Regions found;
  found.width = static_cast<int>(width);
  found.size = static_cast<int>(height * width);
  for (const auto& row : rows)
    for (const auto& column : columns) {
      found.rows.push_back(row[1] - row[0]);
      found.columns.push_back(column[1] - column[0]);
      const bool any = found.rows.back() > 0 && found.columns.back() > 0;
      found.start.push_back(any ? row[0] * found.width + column[0] : 0);
    }
  return found;
}

// Pooling on planes of [batch?][channels][height][width], with a factor for each result.
struct Pooling {
  std::int64_t height = 0, width = 0;
  Spans rows, columns;
  std::vector<float> factors;

  std::int64_t out_height() const { return static_cast<std::int64_t>(rows.size()); }
  std::int64_t out_width() const { return static_cast<std::int64_t>(columns.size()); }
  std::int64_t size() const { return height * width; }
  std::int64_t out_size() const { return out_height() * out_width(); }

  learning::Regions forward() const { return regions(rows, columns, height, width); }
  learning::Regions backward() const {
    return regions(covering(rows, height), covering(columns, width), out_height(), out_width());
  }
};

bool is_planes(const Tensor& t) {
  return usable(t) && (t.dim() == 3 || t.dim() == 4) && t.numel() > 0 && t.numel() < (1 << 27) &&
         t.numel() / (t.size(-1) * t.size(-2)) <= kMaxFactor &&
         t.size(-1) * t.size(-2) <= kMaxFactor;
}

Pooling adaptive(const Tensor& input, std::int64_t out_height, std::int64_t out_width) {
  Pooling pool;
  pool.height = input.size(-2);
  pool.width = input.size(-1);
  pool.rows = adaptive_spans(pool.height, out_height);
  pool.columns = adaptive_spans(pool.width, out_width);
  for (const auto& row : pool.rows)
    for (const auto& column : pool.columns)
      pool.factors.push_back(1.0F /
                             static_cast<float>((row[1] - row[0]) * (column[1] - column[0])));
  return pool;
}

std::vector<std::int64_t> with_planes_of(const Tensor& t, std::int64_t height,
                                         std::int64_t width) {
  std::vector<std::int64_t> sizes = t.sizes().vec();
  sizes[sizes.size() - 2] = height;
  sizes[sizes.size() - 1] = width;
  return sizes;
}

int plane_count(const Tensor& t) {
  return static_cast<int>(t.numel() / (t.size(-1) * t.size(-2)));
}

// Writes the mean of each region, multiplied by the factor, to `out`. `out` must be dense.
void average(const char* name, const Tensor& input, const Pooling& pool, const Tensor& out) {
  const Tensor from = dense(input);
  launch(name, from.nbytes() + out.nbytes(), [&] {
    learning::region_sums(out.mutable_data_ptr<float>(), from.const_data_ptr<float>(),
                          plane_count(from), pool.forward(),
                          std::vector<float>(static_cast<std::size_t>(pool.size()), 1),
                          pool.factors, qpus());
  });
}
void average_backward(const char* name, const Tensor& gradient, const Pooling& pool,
                      const Tensor& out) {
  const Tensor from = dense(gradient);
  launch(name, from.nbytes() + out.nbytes(), [&] {
    learning::region_sums(out.mutable_data_ptr<float>(), from.const_data_ptr<float>(),
                          plane_count(from), pool.backward(), pool.factors,
                          std::vector<float>(static_cast<std::size_t>(pool.size()), 1), qpus());
  });
}

// Arguments: self, output size.
bool adaptive_avg_pool2d(Call& call) {
  const Tensor self = call.tensor(0);
  const std::vector<std::int64_t> size = call[1].toIntVector();
  if (!is_planes(self) || size.size() != 2 || size[0] < 1 || size[1] < 1 ||
      size[0] * size[1] > kMaxFactor)
    return false;
  const Tensor out = at::empty(with_planes_of(self, size[0], size[1]), self.options());
  if (!is_planes(out)) return false;
  average("adaptive_avg_pool2d", self, adaptive(self, size[0], size[1]), out);
  call.finish({out});
  return true;
}
// Arguments: gradient, self.
bool adaptive_avg_pool2d_backward(Call& call) {
  const Tensor gradient = call.tensor(0), self = call.tensor(1);
  if (!is_planes(self) || !is_planes(gradient) || gradient.dim() != self.dim() ||
      plane_count(gradient) != plane_count(self))
    return false;
  const Tensor out = at::empty(self.sizes(), self.options());
  average_backward("adaptive_avg_pool2d_backward", gradient,
                   adaptive(self, gradient.size(-2), gradient.size(-1)), out);
  call.finish({out});
  return true;
}

// Arguments: self, output size, out, indices.
bool adaptive_max_pool2d(Call& call) {
  const Tensor self = call.tensor(0), out = call.tensor(2), places = call.tensor(3);
  if (!is_planes(self) || !is_float(out) || !out.is_contiguous() || !is_planes(out) ||
      !on_device(places) || places.scalar_type() != at::kLong || !places.is_contiguous() ||
      places.sizes() != out.sizes() || plane_count(out) != plane_count(self))
    return false;
  const Tensor from = dense(self);
  const Pooling pool = adaptive(self, out.size(-2), out.size(-1));
  launch("adaptive_max_pool2d", from.nbytes() + places.nbytes() + 2 * out.nbytes(), [&] {
    learning::region_places(places.mutable_data_ptr<std::int64_t>(), from.const_data_ptr<float>(),
                            plane_count(self), pool.forward(), qpus());
    learning::at_places(out.mutable_data_ptr<float>(), from.const_data_ptr<float>(),
                        places.const_data_ptr<std::int64_t>(), plane_count(self),
                        static_cast<int>(pool.out_size()), static_cast<int>(pool.size()), qpus());
  });
  call.finish({out, places});
  return true;
}
// Arguments: gradient, self, indices, out.
bool adaptive_max_pool2d_backward(Call& call) {
  const Tensor& gradient = call.tensor(0);
  const Tensor& self = call.tensor(1);
  const Tensor& places = call.tensor(2);
  const Tensor out = call.out();
  if (!is_planes(self) || !is_planes(gradient) || plane_count(gradient) != plane_count(self) ||
      !on_device(places) || places.scalar_type() != at::kLong || !places.is_contiguous() ||
      places.sizes() != gradient.sizes() || out.sizes() != self.sizes() || !out.is_contiguous())
    return false;
  const Tensor from = dense(gradient);
  const Pooling pool = adaptive(self, gradient.size(-2), gradient.size(-1));
  launch("adaptive_max_pool2d_backward", from.nbytes() + places.nbytes() + out.nbytes(), [&] {
    learning::region_gradient(out.mutable_data_ptr<float>(), from.const_data_ptr<float>(),
                              places.const_data_ptr<std::int64_t>(), plane_count(self),
                              pool.backward(), qpus());
  });
  return true;
}

// The windows of avg_pool2d along an axis, limited to the elements and the padding.
struct Windows {
  Spans inside;
  std::vector<int> lengths;  // lengths of the windows including the padding
};
Windows windows(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t step,
                std::int64_t padding) {
  Windows found;
  for (std::int64_t i = 0; i < out; ++i) {
    const std::int64_t start = i * step - padding;
    const std::int64_t end = std::min(start + kernel, in + padding);
    found.lengths.push_back(static_cast<int>(end - start));
    const std::int64_t first = std::max<std::int64_t>(start, 0);
    found.inside.push_back(
        {static_cast<int>(first), static_cast<int>(std::max(std::min(end, in), first))});
  }
  return found;
}

// Reads kernel, stride, padding, ceil_mode, count_include_pad and divisor? from the arguments,
// starting at argument number `first`.
std::optional<Pooling> averaging(const Call& call, std::size_t first, const Tensor& self,
                                 const Tensor& result) {
  if (!is_planes(self) || result.dim() != self.dim() || result.numel() == 0 ||
      plane_count(result) != plane_count(self))
    return std::nullopt;
  const auto pair = [](const std::vector<std::int64_t>& v) {
    return std::array<std::int64_t, 2>{v[0], v[v.size() - 1]};
  };
  const std::vector<std::int64_t> stride = call[first + 1].toIntVector();
  const std::array<std::int64_t, 2> kernel = pair(call[first].toIntVector()),
                                    step = stride.empty() ? kernel : pair(stride),
                                    padding = pair(call[first + 2].toIntVector());
  Pooling pool;
  pool.height = self.size(-2);
  pool.width = self.size(-1);
  const Windows rows = windows(pool.height, result.size(-2), kernel[0], step[0], padding[0]);
  const Windows columns = windows(pool.width, result.size(-1), kernel[1], step[1], padding[1]);
  pool.rows = rows.inside;
  pool.columns = columns.inside;
  const bool with_padding = call[first + 4].toBool();
  for (std::size_t y = 0; y < rows.inside.size(); ++y)
    for (std::size_t x = 0; x < columns.inside.size(); ++x) {
      std::int64_t count = std::int64_t{rows.lengths[y]} * columns.lengths[x];
      if (!with_padding)
        count = std::int64_t{rows.inside[y][1] - rows.inside[y][0]} *
                (columns.inside[x][1] - columns.inside[x][0]);
      if (!call[first + 5].isNone()) count = call[first + 5].toInt();
      pool.factors.push_back(count == 0 ? 0 : 1.0F / static_cast<float>(count));
    }
  return pool;
}

bool avg_pool2d(Call& call) {
  const Tensor& self = call.tensor(0);
  const Tensor out = call.out();
  const auto pool = averaging(call, 1, self, out);
  if (!pool.has_value()) return false;
  const Tensor to = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  average("avg_pool2d", self, *pool, to);
  if (!to.is_same(out)) out.copy_(to);
  return true;
}
bool avg_pool2d_backward(Call& call) {
  const Tensor &gradient = call.tensor(0), &self = call.tensor(1);
  const Tensor out = call.out();
  if (!is_planes(gradient)) return false;
  const auto pool = averaging(call, 2, self, gradient);
  if (!pool.has_value() || out.sizes() != self.sizes() || !out.is_contiguous()) return false;
  average_backward("avg_pool2d_backward", gradient, *pool, out);
  return true;
}

// --- extremes ------------------------------------------------------------------

struct Extremes {
  Tensor values;
  Tensor places;  // int64
};

// Computes the minima or maxima along a dimension. If `keep` is true, the result keeps this
// dimension with size 1. Returns std::nullopt if the QPUs do not support the computation.
std::optional<Extremes> extremes(const Tensor& t, std::int64_t wrapped, bool keep, bool least) {
  if (!usable(t) || t.numel() == 0 || t.dim() == 0) return std::nullopt;
  const std::int64_t dim = at::maybe_wrap_dim(wrapped, t.dim());
  const Tensor rows = dense(t.movedim(dim, -1));
  const std::int64_t columns = rows.size(-1), count = rows.numel() / columns;
  if (columns > kMaxFactor || count > kMaxFactor) return std::nullopt;
  std::vector<std::int64_t> sizes = rows.sizes().vec();
  sizes.back() = 1;
  const Tensor values = at::empty(sizes, t.options());
  const Tensor indices = at::empty(sizes, t.options().dtype(at::kLong));
  const Tensor narrow = at::empty({count}, t.options().dtype(at::kInt));
  launch(least ? "min" : "max", rows.nbytes() + values.nbytes() + narrow.nbytes(), [&] {
    learning::extremes(values.mutable_data_ptr<float>(), narrow.mutable_data_ptr<int>(),
                       rows.const_data_ptr<float>(), static_cast<int>(count),
                       static_cast<int>(columns), least, qpus());
  });
  std::vector<int> places(static_cast<std::size_t>(count));
  copy_words(places.data(), narrow.const_data_ptr(), narrow.nbytes());
  const std::vector<std::int64_t> wide(places.begin(), places.end());
  copy_words(indices.mutable_data_ptr(), wide.data(), indices.nbytes());
  // Unlike movedim(), unsqueeze() results in the strides of a new tensor, for which copy_() is fast.
  const auto shaped = [&](const Tensor& found) {
    const Tensor flat = found.squeeze(-1);
    return keep ? flat.unsqueeze(dim) : flat;
  };
  return Extremes{shaped(values), shaped(indices)};
}

// Arguments: self, dimension, keep, values, indices.
template <bool least>
bool extreme_of_dimension(Call& call) {
  const Tensor values = call.tensor(3), places = call.tensor(4);
  if (!is_float(values) || !on_device(places) || places.scalar_type() != at::kLong) return false;
  const auto found = extremes(call.tensor(0), call[1].toInt(), call[2].toBool(), least);
  if (!found.has_value() || values.sizes() != found->values.sizes() ||
      places.sizes() != found->places.sizes())
    return false;
  values.copy_(found->values);
  places.copy_(found->places);
  call.finish({values, places});
  return true;
}

}  // namespace

bool place_of_extreme(Call& call, bool least) {
  const Tensor out = call.out();
  if (call[1].isNone() || !on_device(out) || out.scalar_type() != at::kLong) return false;
  const auto found = extremes(call.tensor(0), call[1].toInt(), call[2].toBool(), least);
  if (!found.has_value() || out.sizes() != found->places.sizes()) return false;
  out.copy_(found->places);
  call.finish({out});
  return true;
}

bool extreme_of(Call& call, bool least) {
  const std::vector<std::int64_t> dims = call[1].toIntVector();
  const Tensor out = call.out();
  if (dims.size() != 1) return false;
  const auto found = extremes(call.tensor(0), dims[0], call[2].toBool(), least);
  if (!found.has_value() || out.sizes() != found->values.sizes()) return false;
  out.copy_(found->values);
  return true;
}

namespace {

bool argmin(Call& call) { return place_of_extreme(call, true); }
bool amin(Call& call) { return extreme_of(call, true); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_layer_norm", kernel<layer_norm>());
  m.impl("native_layer_norm_backward", kernel<layer_norm_backward>());
  m.impl("_safe_softmax", &safe_softmax);
  m.impl("_adaptive_avg_pool2d", kernel<adaptive_avg_pool2d>());
  m.impl("_adaptive_avg_pool2d_backward", kernel<adaptive_avg_pool2d_backward>());
  m.impl("adaptive_max_pool2d.out", kernel<adaptive_max_pool2d>());
  m.impl("adaptive_max_pool2d_backward.grad_input", out_kernel<adaptive_max_pool2d_backward>());
  m.impl("avg_pool2d.out", out_kernel<avg_pool2d>());
  m.impl("avg_pool2d_backward.grad_input", out_kernel<avg_pool2d_backward>());
  m.impl("max.dim_max", kernel<extreme_of_dimension<false>>());
  m.impl("min.dim_min", kernel<extreme_of_dimension<true>>());
  m.impl("argmin.out", kernel<argmin>());
  m.impl("amin.out", out_kernel<amin>());
}

}  // namespace
}  // namespace torch_qpu
