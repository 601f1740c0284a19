// Convolution, pooling and batch normalisation on the QPUs, with their gradients.
#include "operators.h"

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

#include "depthwise.h"
#include "learning.h"

namespace torch_qpu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using kernels::Floats;

struct Geometry {
  std::vector<std::int64_t> stride, padding, dilation;
  bool transposed = false;
  std::vector<std::int64_t> output_padding;
  std::int64_t groups = 1;
};

Geometry geometry(const Call& call, std::size_t first) {
  return {call[first].toIntVector(),     call[first + 1].toIntVector(),
          call[first + 2].toIntVector(), call[first + 3].toBool(),
          call[first + 4].toIntVector(), call[first + 5].toInt()};
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kMaxSize = (1 << 15) - 1;
constexpr std::int64_t kMaxWords = std::int64_t{1} << 28;

// Returns true if the kernels support planes of this size, which includes padding.
bool is_plain_image(std::int64_t planes, std::int64_t height, std::int64_t width) {
  return height <= kMaxSize && width <= kMaxSize && height * width <= kMaxFactor &&
         planes * height <= kMaxFactor && planes * height * width < kMaxWords;
}

// Returns true if the kernels support images and windows of these sizes.
bool is_plain_geometry(const Tensor& input, const Tensor& weight, const Geometry& g) {
  if (g.transposed || input.dim() != 4 || weight.dim() != 4 || g.stride.size() != 2 ||
      g.padding.size() != 2 || g.dilation.size() != 2)
    return false;
  for (std::size_t d = 0; d < 2; ++d) {
    const std::int64_t size = input.size(static_cast<std::int64_t>(d) + 2);
    const std::int64_t under = weight.size(static_cast<std::int64_t>(d) + 2);
    if (size > kMaxSize || under > kMaxSize || size < 1 || under < 1 || g.padding[d] < 0 ||
        size + 2 * g.padding[d] <= g.dilation[d] * (under - 1))
      return false;
  }
  return input.numel() > 0 && weight.numel() > 0 &&
         is_plain_image(input.size(0) * input.size(1), input.size(2) + 2 * g.padding[0],
                        input.size(3) + 2 * g.padding[1]);
}

bool is_plain_window(const Tensor& input, const Tensor& weight, const Geometry& g) {
  return usable(input) && usable(weight) && is_plain_geometry(input, weight, g);
}

kernels::Window window(const Tensor& input, IntArrayRef kernel, IntArrayRef stride,
                       IntArrayRef padding, IntArrayRef dilation) {
  kernels::Window w;
  w.batch = static_cast<int>(input.size(0));
  w.channels = static_cast<int>(input.size(1));
  w.height = static_cast<int>(input.size(2));
  w.width = static_cast<int>(input.size(3));
  w.kernelHeight = static_cast<int>(kernel[0]);
  w.kernelWidth = static_cast<int>(kernel[1]);
  w.strideY = static_cast<int>(stride[0]);
  w.strideX = static_cast<int>(stride[1]);
  w.paddingY = static_cast<int>(padding[0]);
  w.paddingX = static_cast<int>(padding[1]);
  w.dilationY = static_cast<int>(dilation[0]);
  w.dilationX = static_cast<int>(dilation[1]);
  return w;
}

// --- convolution ---------------------------------------------------------------

Tensor convolve(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                const Geometry& g) {
  const Tensor from = dense(input), weights = dense(weight);
  const Tensor biases = bias.has_value() ? dense(*bias) : Tensor();
  kernels::Window w = window(from, weights.sizes().slice(2), g.stride, g.padding, g.dilation);
  w.groups = static_cast<int>(g.groups);
  Tensor out =
      at::empty({from.size(0), weights.size(0), w.outHeight(), w.outWidth()}, from.options());
  launch("conv2d", (from.numel() + weights.numel() + out.numel()) * sizeof(float), [&] {
    kernels::conv2d(at(out), at(from), at(weights), biases.defined() ? at(biases) : Floats(nullptr),
                    w, static_cast<int>(weights.size(0)), qpus());
  });
  return out;
}

// Returns true if each channel has its own kernels. A single launch then processes all planes.
bool is_depthwise(const Tensor& input, const Tensor& weight, const Geometry& g) {
  return g.groups > 1 && g.groups == input.size(1) && weight.size(1) == 1 &&
         weight.size(0) % g.groups == 0 && input.size(0) * weight.size(0) <= kMaxFactor;
}

// Describes a depthwise convolution that converts images with the sizes of `images` to results
// with the sizes of `results`.
learning::Depthwise depthwise_of(const Tensor& images, const Tensor& results, const Tensor& weight,
                                 const Geometry& g) {
  learning::Depthwise shape;
  const kernels::Window w =
      window(images, weight.sizes().slice(2), g.stride, g.padding, g.dilation);
  shape.window.height = w.height;
  shape.window.width = w.width;
  shape.window.out_height = static_cast<int>(results.size(2));
  shape.window.out_width = static_cast<int>(results.size(3));
  shape.window.kernel_height = w.kernelHeight;
  shape.window.kernel_width = w.kernelWidth;
  shape.window.stride_y = w.strideY;
  shape.window.stride_x = w.strideX;
  shape.window.padding_y = w.paddingY;
  shape.window.padding_x = w.paddingX;
  shape.window.dilation_y = w.dilationY;
  shape.window.dilation_x = w.dilationX;
  shape.batch = w.batch;
  shape.channels = w.channels;
  shape.outputs = static_cast<int>(weight.size(0) / w.channels);
  return shape;
}

Tensor convolve_depthwise(const Tensor& input, const Tensor& weight,
                          const std::optional<Tensor>& bias, const Geometry& g) {
  const Tensor from = dense(input), weights = dense(weight);
  const Tensor biases = bias.has_value() ? dense(*bias) : Tensor();
  const kernels::Window w =
      window(from, weights.sizes().slice(2), g.stride, g.padding, g.dilation);
  Tensor out =
      at::empty({from.size(0), weights.size(0), w.outHeight(), w.outWidth()}, from.options());
  launch("conv2d", (from.numel() + weights.numel() + out.numel()) * sizeof(float), [&] {
    learning::depthwise(out.mutable_data_ptr<float>(), from.const_data_ptr<float>(),
                        weights.const_data_ptr<float>(),
                        biases.defined() ? biases.const_data_ptr<float>() : nullptr,
                        depthwise_of(from, out, weights, g), qpus());
  });
  return out;
}

// Returns part number i of a tensor that is divided along `dim` into `groups` equal parts.
Tensor part(const Tensor& t, std::int64_t dim, std::int64_t i, std::int64_t groups) {
  const std::int64_t size = t.size(dim) / groups;
  return t.narrow(dim, i * size, size);
}

// Returns elements of `from`, which must be dense, in another order (see learning::take).
Tensor taken(const Tensor& from, IntArrayRef sizes, const std::vector<int>& firsts,
             const std::vector<int>& places) {
  Tensor out = at::empty(sizes, from.options());
  launch("take", (from.numel() + out.numel()) * sizeof(float), [&] {
    learning::take(out.mutable_data_ptr<float>(), from.const_data_ptr<float>(), firsts, places,
                   qpus());
  });
  return out;
}

// Returns a copy in which the first two dimensions are exchanged.
Tensor exchanged(const Tensor& t) {
  const std::int64_t a = t.size(0), b = t.size(1), size = t.numel() / (a * b);
  std::vector<std::int64_t> sizes = t.sizes().vec();
  std::swap(sizes[0], sizes[1]);
  if (a == 1 || b == 1) return t.view(sizes);
  std::vector<int> firsts, places(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < b; ++i)
    for (std::int64_t j = 0; j < a; ++j) firsts.push_back(static_cast<int>((j * b + i) * size));
  std::iota(places.begin(), places.end(), 0);
  return taken(t, sizes, firsts, places);
}

// The operands from which the gradients of one group are computed. All of them must be dense.
struct Backward {
  Tensor gradient, input, weight;
  const Geometry& g;
  std::optional<Tensor> bias = std::nullopt;  // added to the gradient of the input
  bool depthwise = false;  // if true, all groups are processed at once, with one channel each

  std::int64_t height() const { return input.size(2) + g.dilation[0] * (weight.size(2) - 1); }
  std::int64_t width() const { return input.size(3) + g.dilation[1] * (weight.size(3) - 1); }
  // Returns true if the kernels support the intermediate tensors.
  bool is_plain() const {
    return is_plain_image(gradient.size(0) * gradient.size(1), height(), width()) &&
           input.size(0) * gradient.size(2) * gradient.size(3) <= kMaxFactor;
  }
};

// Convolves the output gradient with the kernels. The gradient is first dilated by the stride of
// the windows, and the kernels are rotated by 180 degrees.
Tensor gradient_of_input(const Backward& b) {
  const std::int64_t batch = b.input.size(0), channels = b.input.size(1);
  const std::int64_t outputs = b.weight.size(0), tall = b.height(), wide = b.width();
  const std::int64_t rows = b.gradient.size(2), columns = b.gradient.size(3);
  // Returns the index in the gradient of element i along the axis, or -1.
  const auto source = [&](std::int64_t i, std::size_t axis, std::int64_t size) {
    const std::int64_t under = b.weight.size(static_cast<std::int64_t>(axis) + 2);
    const std::int64_t at = i - (b.g.dilation[axis] * (under - 1) - b.g.padding[axis]);
    const std::int64_t step = b.g.stride[axis];
    return at >= 0 && at % step == 0 && at / step < size ? at / step : -1;
  };
  std::vector<int> firsts, places;
  for (std::int64_t i = 0; i < batch * outputs; ++i)
    firsts.push_back(static_cast<int>(i * rows * columns));
  for (std::int64_t y = 0; y < tall; ++y)
    for (std::int64_t x = 0; x < wide; ++x) {
      const std::int64_t row = source(y, 0, rows), column = source(x, 1, columns);
      places.push_back(row < 0 || column < 0 ? -1 : static_cast<int>(row * columns + column));
    }
  const Tensor spread = taken(b.gradient, {batch, outputs, tall, wide}, firsts, places);

  const auto size = static_cast<int>(b.weight.size(2) * b.weight.size(3));
  const Geometry plain{{1, 1}, {0, 0}, b.g.dilation, false, {}, b.depthwise ? channels : 1};
  firsts.clear();
  const std::int64_t seen = b.depthwise ? 1 : outputs;  // number of outputs that use each channel
  for (std::int64_t c = 0; c < channels; ++c)
    for (std::int64_t o = 0; o < seen; ++o)
      firsts.push_back(static_cast<int>(b.depthwise ? c : o * channels + c) * size);
  places.resize(static_cast<std::size_t>(size));
  std::iota(places.rbegin(), places.rend(), 0);
  const Tensor turned =
      taken(b.weight, {channels, seen, b.weight.size(2), b.weight.size(3)}, firsts, places);
  if (b.depthwise) return convolve_depthwise(spread, turned, b.bias, plain);
  return convolve(spread, turned, b.bias, plain);
}

// Convolves the input with the output gradient as the kernel, and sums over the batch. Stride and
// dilation are exchanged.
Tensor gradient_of_weight(const Backward& b) {
  if (b.depthwise) {
    Tensor out = at::empty(b.weight.sizes(), b.weight.options());
    launch("conv2d", (b.input.numel() + b.gradient.numel() + out.numel()) * sizeof(float), [&] {
      learning::depthwise_weights(out.mutable_data_ptr<float>(), b.input.const_data_ptr<float>(),
                                  b.gradient.const_data_ptr<float>(),
                                  depthwise_of(b.input, b.gradient, b.weight, b.g), qpus());
    });
    return out;
  }
  const Tensor found =
      convolve(exchanged(b.input), exchanged(b.gradient), std::nullopt,
               {b.g.dilation, b.g.padding, b.g.stride, false, {}, 1});
  // The result has the shape [channels][outputs]. The result has additional rows and columns if the
  // stride left a remainder.
  const std::int64_t channels = found.size(0), outputs = found.size(1), wide = found.size(3);
  std::vector<int> firsts, places;
  for (std::int64_t o = 0; o < outputs; ++o)
    for (std::int64_t c = 0; c < channels; ++c)
      firsts.push_back(static_cast<int>((c * outputs + o) * found.size(2) * wide));
  for (std::int64_t y = 0; y < b.weight.size(2); ++y)
    for (std::int64_t x = 0; x < b.weight.size(3); ++x)
      places.push_back(static_cast<int>(y * wide + x));
  return taken(found, b.weight.sizes(), firsts, places);
}

learning::Planes planes_of(const Tensor& t) {
  return {static_cast<int>(t.size(0)), static_cast<int>(t.size(1)),
          static_cast<int>(t.numel() / (t.size(0) * t.size(1)))};
}

// Returns a tensor on the device that contains one number per channel.
Tensor per_channel(const std::vector<double>& values, const Tensor& like) {
  Tensor out = at::empty({static_cast<std::int64_t>(values.size())}, like.options());
  auto* to = out.mutable_data_ptr<float>();
  for (const double value : values) *to++ = static_cast<float>(value);
  return out;
}

Tensor gradient_of_bias(const Tensor& gradient) {
  std::vector<double> sums;
  launch("moments", 2 * gradient.numel() * sizeof(float), [&] {
    const auto* const from = gradient.const_data_ptr<float>();
    sums = learning::moments(from, from, {}, {}, planes_of(gradient), qpus()).sum;
  });
  return per_channel(sums, gradient);
}

// Returns the parts of a convolution, one for each group. If each channel is its own group,
// returns a single part. Returns an empty list if the kernels do not support the intermediate
// tensors. `gradient` is the gradient with respect to the output.
std::vector<Backward> by_group(const Tensor& gradient, const Tensor& input, const Tensor& weight,
                               const Geometry& g, const std::optional<Tensor>& bias) {
  std::vector<Backward> groups;
  const bool at_once =
      is_depthwise(input, weight, g) && weight.size(0) == input.size(1);
  const auto add = [&](std::int64_t i, std::int64_t count) {
    const auto own = [&](const Tensor& t, std::int64_t dim) {
      return t.is_meta() ? part(t, dim, i, count) : dense(part(t, dim, i, count));
    };
    groups.push_back({own(gradient, 1), own(input, 1), own(weight, 0), g,
                      bias.has_value() ? std::optional(own(*bias, 0)) : std::nullopt, at_once});
    return groups.back().is_plain();
  };
  const std::int64_t count = at_once ? 1 : g.groups;
  for (std::int64_t i = 0; i < count; ++i)
    if (!add(i, count)) return {};
  return groups;
}

// Computes the results of all groups, and combines them along dimension `dim` of a tensor with
// these sizes.
Tensor joined(const std::vector<Backward>& groups, Tensor (*made)(const Backward&),
              IntArrayRef sizes, std::int64_t dim) {
  if (groups.size() == 1) return made(groups[0]);
  Tensor all = at::empty(sizes, groups[0].gradient.options());
  const auto count = static_cast<std::int64_t>(groups.size());
  for (std::int64_t i = 0; i < count; ++i)
    part(all, dim, i, count).copy_(made(groups[static_cast<std::size_t>(i)]));
  return all;
}

// A transposed convolution is the gradient of an ordinary convolution with respect to its input.
// Returns an undefined tensor if the kernels do not support the operation.
Tensor transposed(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                  Geometry g) {
  g.transposed = false;
  if (input.dim() != 4 || weight.dim() != 4 || g.stride.size() != 2 ||
      g.output_padding.size() != 2 || input.size(1) != weight.size(0))
    return {};
  std::vector<std::int64_t> sizes{input.size(0), weight.size(1) * g.groups, 0, 0};
  for (std::size_t d = 0; d < 2; ++d) {
    const auto axis = static_cast<std::int64_t>(d) + 2;
    sizes[d + 2] = (input.size(axis) - 1) * g.stride[d] - 2 * g.padding[d] +
                   g.dilation[d] * (weight.size(axis) - 1) + g.output_padding[d] + 1;
  }
  // Only the sizes of this tensor are used.
  const Tensor out = at::empty(sizes, input.options().device(at::kMeta));
  if (!is_plain_geometry(out, weight, g) || !usable(input) || !usable(weight) ||
      input.numel() == 0)
    return {};
  // NOLINTNEXTLINE(readability-suspicious-call-argument): the input is the gradient here
  const std::vector<Backward> groups = by_group(input, out, weight, g, bias);
  if (groups.empty()) return {};
  return joined(groups, gradient_of_input, sizes, 1);
}

bool convolution(Call& call) {
  const Tensor input = call.tensor(0), weight = call.tensor(1);
  const std::optional<Tensor> bias = optional(call[2]);
  const Geometry g = geometry(call, 3);
  const bool usable_bias = !bias.has_value() || usable(*bias);
  if (usable_bias && g.transposed) {
    const Tensor out = transposed(input, weight, bias, g);
    if (out.defined()) {
      call.finish({out});
      return true;
    }
  }
  if (!is_plain_window(input, weight, g) || !usable_bias) {
    const Span span(Kind::fallback, "aten::convolution");
    const Tensor result = at::convolution(
        for_cpu(input), for_cpu(weight), bias.has_value() ? std::optional(for_cpu(*bias)) : bias,
        g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups);
    call.finish({to_device(result)});
    return true;
  }
  call.finish({is_depthwise(input, weight, g) ? convolve_depthwise(input, weight, bias, g)
                                              : convolve(input, weight, bias, g)});
  return true;
}

// Returns true if the result of a convolution of `image` would have the same shape as `result`.
bool gives(const Tensor& image, const Tensor& result, const Tensor& weight, const Geometry& g) {
  for (std::size_t d = 0; d < 2; ++d) {
    const auto axis = static_cast<std::int64_t>(d) + 2;
    const std::int64_t reach =
        image.size(axis) + 2 * g.padding[d] - g.dilation[d] * (weight.size(axis) - 1) - 1;
    if (reach < 0 || reach / g.stride[d] + 1 != result.size(axis)) return false;
  }
  return true;
}

bool convolution_backward(Call& call) {
  const Tensor gradient = call.tensor(0), input = call.tensor(1), weight = call.tensor(2);
  const Geometry given = geometry(call, 3);
  const std::vector<bool> flags = call[9].toBoolList().vec();
  const std::array<bool, 3> wanted = {flags[0], flags[1], flags[2]};
  Geometry g = given;
  g.transposed = false;
  // The input and the result of the corresponding convolution without transposition.
  const Tensor &image = given.transposed ? gradient : input,
               &result = given.transposed ? input : gradient;
  std::vector<Backward> groups;
  if (is_plain_window(image, weight, g) && usable(result) && result.numel() > 0 &&
      gives(image, result, weight, g))
    groups = by_group(result, image, weight, g, std::nullopt);
  if (groups.empty()) {
    const Span span(Kind::fallback, "aten::convolution_backward");
    const std::int64_t channels = given.transposed ? weight.size(1) * g.groups : weight.size(0);
    auto [a, b, c] = at::convolution_backward(
        for_cpu(gradient), for_cpu(input), for_cpu(weight), IntArrayRef{channels}, g.stride,
        g.padding, g.dilation, given.transposed, g.output_padding, g.groups, wanted);
    const auto back = [](const Tensor& t) { return t.defined() ? to_device(t) : t; };
    call.finish({back(a), back(b), back(c)});
    return true;
  }
  Tensor of_input, of_weight;
  if (wanted[0] && given.transposed)
    of_input = is_depthwise(image, weight, g) ? convolve_depthwise(image, weight, std::nullopt, g)
                                              : convolve(image, weight, std::nullopt, g);
  else if (wanted[0])
    of_input = joined(groups, gradient_of_input, image.sizes(), 1);
  if (wanted[1]) of_weight = joined(groups, gradient_of_weight, weight.sizes(), 0);
  call.finish({of_input, of_weight, wanted[2] ? gradient_of_bias(dense(gradient)) : Tensor()});
  return true;
}

// --- pooling -------------------------------------------------------------------

// Returns the window of a pooling operation on [batch?][channels][height][width], or std::nullopt
// if the QPUs do not support it.
std::optional<kernels::Window> pooling(const Tensor& self, IntArrayRef kernel, IntArrayRef stride,
                                       IntArrayRef padding, IntArrayRef dilation) {
  if (kernel.empty() || padding.empty() || dilation.empty() || !usable(self) ||
      self.numel() == 0 || (self.dim() != 3 && self.dim() != 4))
    return std::nullopt;
  const auto pair = [](IntArrayRef v) {
    return std::array<std::int64_t, 2>{v[0], v[v.size() - 1]};
  };
  const std::array<std::int64_t, 2> under = pair(kernel), pad = pair(padding),
                                    step = pair(stride.empty() ? kernel : stride),
                                    apart = pair(dilation), size = {self.size(-2), self.size(-1)};
  for (std::size_t d = 0; d < 2; ++d)
    if (under[d] < 1 || under[d] > kMaxSize || step[d] < 1 || step[d] > kMaxSize ||
        apart[d] < 1 || apart[d] > kMaxSize || pad[d] < 0 || 2 * pad[d] > under[d] ||
        size[d] > kMaxSize || size[d] + 2 * pad[d] <= apart[d] * (under[d] - 1))
      return std::nullopt;
  if (!is_plain_image(self.numel() / (size[0] * size[1]), size[0] + 2 * pad[0],
                      size[1] + 2 * pad[1]))
    return std::nullopt;
  return window(self.dim() == 4 ? self : self.unsqueeze(0), under, step, pad, apart);
}

// Returns the window together with the size of the result, which is larger if ceil_mode is true.
learning::Pooling pooling_of(const kernels::Window& w, const Tensor& result) {
  learning::Pooling s;
  s.planes = w.batch * w.channels;
  s.height = w.height;
  s.width = w.width;
  s.out_height = static_cast<int>(result.size(-2));
  s.out_width = static_cast<int>(result.size(-1));
  s.kernel_height = w.kernelHeight;
  s.kernel_width = w.kernelWidth;
  s.stride_y = w.strideY;
  s.stride_x = w.strideX;
  s.padding_y = w.paddingY;
  s.padding_x = w.paddingX;
  s.dilation_y = w.dilationY;
  s.dilation_x = w.dilationX;
  return s;
}

void pool(const Tensor& out, const Tensor& from, const kernels::Window& w) {
  launch("max_pool2d", (from.numel() + out.numel()) * sizeof(float),
         [&] { kernels::maxPool2d(at(out), at(from), w, qpus()); });
}

Tensor max_pool2d(const Tensor& self, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                  IntArrayRef dilation, bool ceil_mode) {
  const auto w = ceil_mode ? std::nullopt : pooling(self, kernel, stride, padding, dilation);
  if (!w.has_value() || self.dim() != 4)
    return std::get<0>(
        at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil_mode));
  Tensor out =
      at::empty({self.size(0), self.size(1), w->outHeight(), w->outWidth()}, self.options());
  pool(out, dense(self), *w);
  return out;
}

Tensor max_pool2d_with_gradient(const Tensor& self, IntArrayRef kernel, IntArrayRef stride,
                                IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  if ((at::GradMode::is_enabled() && self.requires_grad()) || self._fw_grad(0).defined())
    return std::get<0>(
        at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil_mode));
  const at::AutoDispatchBelowAutograd below;
  return at::max_pool2d(self, kernel, stride, padding, dilation, ceil_mode);
}

bool is_places(const Tensor& t) {
  return on_device(t) && t.scalar_type() == at::kLong && t.is_contiguous();
}

// Arguments: self, kernel, stride, padding, dilation, ceil_mode, out, indices.
bool max_pool2d_with_places(Call& call) {
  const Tensor self = call.tensor(0), out = call.tensor(6), places = call.tensor(7);
  const std::vector<std::int64_t> kernel = call[1].toIntVector(), stride = call[2].toIntVector(),
                                  padding = call[3].toIntVector(),
                                  dilation = call[4].toIntVector();
  if (call[5].toBool()) return false;
  const auto w = pooling(self, kernel, stride, padding, dilation);
  if (!w.has_value()) return false;
  std::vector<std::int64_t> shape = self.sizes().vec();
  shape[shape.size() - 2] = w->outHeight();
  shape[shape.size() - 1] = w->outWidth();
  if (!is_float(out) || !out.is_contiguous() || !is_places(places) ||
      out.sizes() != IntArrayRef(shape) || places.sizes() != out.sizes())
    return false;
  const Tensor from = dense(self);
  pool(out, from, *w);
  launch("max_pool2d_places", from.numel() * sizeof(float) + places.nbytes(), [&] {
    learning::pool_places(places.mutable_data_ptr<std::int64_t>(), from.const_data_ptr<float>(),
                          pooling_of(*w, out), qpus());
  });
  call.finish({out, places});
  return true;
}

// Arguments: gradient, self, kernel, stride, padding, dilation, ceil_mode, indices, out.
bool max_pool2d_backward(Call& call) {
  const Tensor& gradient = call.tensor(0);
  const Tensor& self = call.tensor(1);
  const Tensor& places = call.tensor(7);
  const Tensor out = call.out();
  const std::vector<std::int64_t> kernel = call[2].toIntVector(), stride = call[3].toIntVector(),
                                  padding = call[4].toIntVector(),
                                  dilation = call[5].toIntVector();
  const auto w = pooling(self, kernel, stride, padding, dilation);
  if (!w.has_value() || !usable(gradient) || gradient.numel() == 0 || !is_places(places) ||
      places.sizes() != gradient.sizes() || 2 * places.numel() >= kMaxWords ||
      gradient.dim() != self.dim() || out.sizes() != self.sizes() || !out.is_contiguous())
    return false;
  const Tensor from = dense(gradient);
  launch("max_pool2d_backward", (from.numel() + out.numel()) * sizeof(float) + places.nbytes(),
         [&] {
           learning::pool_backward(out.mutable_data_ptr<float>(), from.const_data_ptr<float>(),
                                   places.const_data_ptr<std::int64_t>(), pooling_of(*w, from),
                                   qpus());
         });
  return true;
}

// --- batch normalisation -------------------------------------------------------

// Returns true if the kernels support a tensor [batch][channels]... with this shape.
bool is_plain_batch(const Tensor& t) {
  if (!usable(t) || t.dim() < 2 || t.numel() == 0) return false;
  const std::int64_t planes = t.size(0) * t.size(1);
  return planes <= kMaxFactor && t.numel() / planes <= kMaxFactor && t.numel() < kMaxWords;
}

// Returns true if an optional tensor is absent or has one number per channel.
bool is_of_channels(const std::optional<Tensor>& t, const Tensor& input) {
  return !t.has_value() || (usable(*t) && t->dim() == 1 && t->size(0) == input.size(1) &&
                            t->is_contiguous());
}

std::vector<float> numbers(const Tensor& t) {
  std::vector<float> found(static_cast<std::size_t>(t.numel()));
  copy_words(found.data(), t.const_data_ptr<float>(), t.nbytes());
  return found;
}

// Sets all elements of a channel to NaN if one of the numbers for this channel is NaN. The QPUs
// would treat NaN as a number.
void spread_nan(const Tensor& out, at::ArrayRef<std::optional<Tensor>> numbers) {
  for (std::int64_t c = 0; c < out.size(1); ++c)
    if (std::any_of(numbers.begin(), numbers.end(), [&](const std::optional<Tensor>& t) {
          return t.has_value() && std::isnan(t->const_data_ptr<float>()[c]);
        }))
      out.select(1, c).fill_(kNan);
}

// Computes (from - mean) / sqrt(variance + epsilon) * weight + bias.
Tensor normalised(const Tensor& from, const Tensor& mean, const Tensor& variance,
                  const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                  double epsilon) {
  Tensor out = at::empty(from.sizes(), from.options());
  const learning::Planes s = planes_of(from);
  launch("batch_norm", 2 * from.numel() * sizeof(float), [&] {
    kernels::batchNorm(at(out), at(from), at(mean), at(variance),
                       weight.has_value() ? at(*weight) : Floats(nullptr),
                       bias.has_value() ? at(*bias) : Floats(nullptr),
                       static_cast<float>(epsilon), s.batch, s.channels, s.size, qpus());
  });
  spread_nan(out, {mean, variance, weight, bias});
  return out;
}

// The mean and the population variance of each channel.
struct Statistics {
  std::vector<double> mean, variance;
};

Statistics statistics(const Tensor& from) {
  const learning::Planes s = planes_of(from);
  const double count = static_cast<double>(s.batch) * s.size;
  Statistics found;
  launch("moments", 2 * from.numel() * sizeof(float), [&] {
    const auto* const x = from.const_data_ptr<float>();
    found.mean = learning::moments(x, x, {}, {}, s, qpus()).sum;
    for (double& mean : found.mean) mean /= count;
    // If an element is Inf or NaN, the sum is Inf. In this case the mean is set to NaN, and the
    // variance therefore also becomes NaN.
    for (double& mean : found.mean)
      if (!std::isfinite(mean)) mean = kNan;
    const std::vector<float> middle(found.mean.begin(), found.mean.end());
    const learning::Moments m = learning::moments(x, x, middle, middle, s, qpus());
    for (std::size_t c = 0; c < middle.size(); ++c) {
      // The mean of the deviations is the rounding error of the mean.
      const double rest = m.sum[c] / count;
      found.mean[c] = middle[c] + rest;
      found.variance.push_back(std::isnan(middle[c])
                                   ? kNan
                                   : std::max(m.product[c] / count - rest * rest, 0.0));
    }
  });
  return found;
}

// Computes running = (1 - momentum) running + momentum factor values.
void move(const std::optional<Tensor>& running, const std::vector<double>& values, double factor,
          double momentum) {
  if (!running.has_value()) return;
  auto* to = running->mutable_data_ptr<float>();
  for (const double value : values) {
    *to = static_cast<float>((1 - momentum) * *to + momentum * factor * value);
    ++to;
  }
}

// Arguments: input, weight?, bias?, mean?, variance?, training, momentum, epsilon.
bool batch_norm(Call& call) {
  const Tensor input = call.tensor(0);
  const std::optional<Tensor> weight = optional(call[1]), bias = optional(call[2]);
  const std::optional<Tensor> mean = optional(call[3]), variance = optional(call[4]);
  const bool training = call[5].toBool();
  const double momentum = call[6].toDouble(), epsilon = call[7].toDouble();
  if (!is_plain_batch(input) || (!training && !(mean.has_value() && variance.has_value())))
    return false;
  for (const auto& t : {weight, bias, mean, variance})
    if (!is_of_channels(t, input)) return false;
  const Tensor from = dense(input);
  if (!training) {
    const Tensor out = normalised(from, *mean, *variance, weight, bias, epsilon);
    call.finish({out, at::empty({0}, input.options()), at::empty({0}, input.options())});
    return true;
  }
  const auto count = static_cast<double>(input.numel()) / static_cast<double>(input.size(1));
  if (count < 2) return false;
  const Statistics found = statistics(from);
  move(mean, found.mean, 1, momentum);
  move(variance, found.variance, count / (count - 1), momentum);
  std::vector<double> inverse;
  inverse.reserve(found.variance.size());
  for (const double v : found.variance) inverse.push_back(1 / std::sqrt(v + epsilon));
  const Tensor middle = per_channel(found.mean, input);
  const Tensor out = normalised(from, middle, per_channel(found.variance, input), weight, bias,
                                epsilon);
  call.finish({out, middle, per_channel(inverse, input)});
  return true;
}

// Arguments: gradient, input, weight?, mean?, variance?, saved mean?, saved inverse?, training,
// epsilon, wanted.
bool batch_norm_backward(Call& call) {
  const Tensor gradient = call.tensor(0), input = call.tensor(1);
  const std::optional<Tensor> weight = optional(call[2]);
  const bool training = call[7].toBool();
  const std::optional<Tensor> mean = optional(call[training ? 5 : 3]);
  const std::optional<Tensor> spread = optional(call[training ? 6 : 4]);
  const double epsilon = call[8].toDouble();
  const std::vector<bool> wanted = call[9].toBoolList().vec();
  if (!is_plain_batch(input) || !is_plain_batch(gradient) || gradient.sizes() != input.sizes() ||
      !mean.has_value() || !spread.has_value())
    return false;
  for (const auto& t : {weight, mean, spread})
    if (!is_of_channels(t, input)) return false;
  const Tensor x = dense(input), g = dense(gradient);
  const learning::Planes s = planes_of(x);
  const double count = static_cast<double>(s.batch) * s.size;
  const std::vector<float> middle = numbers(*mean);
  std::vector<float> inverse = numbers(*spread);
  if (!training)
    for (float& v : inverse) v = static_cast<float>(1 / std::sqrt(double{v} + epsilon));
  const std::vector<float> factor =
      weight.has_value() ? numbers(*weight) : std::vector<float>(middle.size(), 1);

  learning::Moments m;
  launch("moments", 2 * x.numel() * sizeof(float), [&] {
    m = learning::moments(g.const_data_ptr<float>(), x.const_data_ptr<float>(), {}, middle, s,
                          qpus());
  });
  Tensor of_input, of_weight, of_bias;
  if (wanted[0]) {
    of_input = at::empty(x.sizes(), x.options());
    std::vector<learning::Blend> channels;
    channels.reserve(middle.size());
    for (std::size_t c = 0; c < middle.size(); ++c) {
      learning::Blend blend;
      const double scale = double{factor[c]} * inverse[c];
      blend.factor_a = static_cast<float>(scale);
      if (training) {
        blend.middle_a = static_cast<float>(m.sum[c] / count);
        blend.middle_b = middle[c];
        blend.factor_b = static_cast<float>(-scale * inverse[c] * inverse[c] * m.product[c] /
                                            count);
      }
      channels.push_back(blend);
    }
    launch("batch_norm_backward", 3 * x.numel() * sizeof(float), [&] {
      learning::blend(of_input.mutable_data_ptr<float>(), g.const_data_ptr<float>(),
                      x.const_data_ptr<float>(), channels, s, qpus());
    });
    for (std::size_t c = 0; c < channels.size(); ++c) {
      const learning::Blend& blend = channels[c];
      if (std::isfinite(blend.factor_a) && std::isfinite(blend.factor_b) &&
          std::isfinite(blend.middle_a) && std::isfinite(blend.middle_b))
        continue;
      of_input.select(1, static_cast<std::int64_t>(c)).fill_(kNan);
    }
  }
  if (wanted[1]) {
    std::vector<double> values = m.product;
    for (std::size_t c = 0; c < values.size(); ++c) values[c] *= inverse[c];
    of_weight = per_channel(values, x);
  }
  if (wanted[2]) of_bias = per_channel(m.sum, x);
  call.finish({of_input, of_weight, of_bias});
  return true;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", kernel<convolution>());
  m.impl("convolution_backward_overrideable", kernel<convolution_backward>());
  m.impl("max_pool2d", &max_pool2d);
  m.impl("max_pool2d_with_indices.out", kernel<max_pool2d_with_places>());
  m.impl("max_pool2d_with_indices_backward.grad_input", out_kernel<max_pool2d_backward>());
  m.impl("native_batch_norm", kernel<batch_norm>());
  m.impl("native_batch_norm_backward", kernel<batch_norm_backward>());
}

// If a gradient is required, in reverse or in forward mode, the operator must also return the
// indices.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("max_pool2d", &max_pool2d_with_gradient);
}

}  // namespace
}  // namespace torch_qpu
