// The cells of nn.LSTM and nn.GRU. On this device, PyTorch calls a fused operator for each cell.
// This operator cannot fall back to the CPU, because it has no CPU kernel.
#include "operators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <vector>

#include "recurrent.h"

namespace torch_qpu {
namespace {

using at::Tensor;

Tensor made(const recurrent::Shape& s, int parts, const Tensor& like) {
  return at::empty({s.rows, std::int64_t{s.columns} * parts}, like.options());
}

// Returns true if an optional tensor is absent, or if it has this shape and the dtype float32 and
// is on the device.
bool is_of(const std::optional<Tensor>& t, at::IntArrayRef shape) {
  return !t.has_value() || (usable(*t) && t->sizes() == shape);
}

std::optional<Tensor> packed(const std::optional<Tensor>& t) {
  return t.has_value() ? std::optional(dense(*t)) : t;
}

// Returns the shape of a state if the kernels support it.
std::optional<recurrent::Shape> shape_of(const Tensor& state, int parts) {
  constexpr std::int64_t most_words = std::int64_t{1} << 28;
  if (!usable(state) || state.dim() != 2 || state.size(0) > kMaxFactor ||
      state.size(1) * parts > kMaxFactor || state.numel() * parts >= most_words)
    return std::nullopt;
  return recurrent::Shape{static_cast<int>(state.size(0)), static_cast<int>(state.size(1))};
}

// The arguments of a cell: input gates, hidden gates, state, input bias?, hidden bias?. A
// question mark means that the argument is optional.
struct Cell {
  Tensor input, hidden, state;
  std::optional<Tensor> input_bias, hidden_bias;

  explicit Cell(const Call& call)
      : input(call.tensor(0)),
        hidden(call.tensor(1)),
        state(call.tensor(2)),
        input_bias(optional(call[3])),
        hidden_bias(optional(call[4])) {
    TORCH_CHECK(input_bias.has_value() == hidden_bias.has_value(),
                "expected both biases of a recurrent cell or neither");
  }

  // Returns the shape of the state if the QPUs support it. `gates` is the number of gates in the
  // cell. `parts` is the number of values that are saved for the gradient.
  std::optional<recurrent::Shape> shape(int gates, int parts) const {
    const auto found = shape_of(state, parts);
    if (!found.has_value()) return std::nullopt;
    const std::int64_t wide = std::int64_t{found->columns} * gates;
    if (!is_of(input, {found->rows, wide}) || !is_of(hidden, {found->rows, wide}) ||
        !is_of(input_bias, {wide}) || !is_of(hidden_bias, {wide}))
      return std::nullopt;
    return found;
  }

  template <typename Run>
  void with_gates(Run run) const {
    const Tensor a = dense(input), b = dense(hidden);
    const std::optional<Tensor> c = packed(input_bias), d = packed(hidden_bias);
    run(recurrent::Gates{data(a), data(b), data(c), data(d)});
  }

  // Return the two terms of the gates' sums on the CPU, each as `count` tensors.
  std::vector<Tensor> parts_of_input(std::int64_t count) const {
    return on_cpu(input, input_bias, count);
  }
  std::vector<Tensor> parts_of_hidden(std::int64_t count) const {
    return on_cpu(hidden, hidden_bias, count);
  }

 private:
  static std::vector<Tensor> on_cpu(const Tensor& t, const std::optional<Tensor>& bias,
                                    std::int64_t count) {
    const Tensor from = for_cpu(t);
    return (bias.has_value() ? from + for_cpu(*bias) : from).chunk(count, 1);
  }
};

std::size_t bytes(const recurrent::Shape& s, int arrays) {
  return static_cast<std::size_t>(s.rows) * static_cast<std::size_t>(s.columns) *
         static_cast<std::size_t>(arrays) * sizeof(float);
}

bool lstm_cell(Call& call) {
  const Cell cell(call);
  const auto s = cell.shape(recurrent::kLstmGates, recurrent::kLstmGates);
  if (!s.has_value()) {
    const Span span(Kind::fallback, "aten::_thnn_fused_lstm_cell");
    const auto a = cell.parts_of_input(4), b = cell.parts_of_hidden(4);
    const Tensor input = (a[0] + b[0]).sigmoid(), forget = (a[1] + b[1]).sigmoid(),
                 state = (a[2] + b[2]).tanh(), output = (a[3] + b[3]).sigmoid();
    const Tensor cy = forget * for_cpu(cell.state) + input * state;
    call.finish({to_device(output * cy.tanh()), to_device(cy),
                 to_device(at::cat({input, forget, state, output}, 1))});
    return true;
  }
  const Tensor cx = dense(cell.state);
  const Tensor hy = made(*s, 1, cx), cy = made(*s, 1, cx);
  const Tensor kept = made(*s, recurrent::kLstmGates, cx);
  cell.with_gates([&](const recurrent::Gates& gates) {
    launch("lstm_cell", bytes(*s, 15), [&] {
      recurrent::lstm(hy.mutable_data_ptr<float>(), cy.mutable_data_ptr<float>(),
                      kept.mutable_data_ptr<float>(), gates, data(cx), *s, qpus());
    });
  });
  call.finish({hy, cy, kept});
  return true;
}

// Arguments: gradient of hy?, gradient of cy?, cx, cy, saved values, whether there are biases.
bool lstm_cell_backward(Call& call) {
  const std::optional<Tensor> of_hy = optional(call[0]), of_cy = optional(call[1]);
  const Tensor &cx = call.tensor(2), &cy = call.tensor(3), &kept = call.tensor(4);
  const bool has_bias = call[5].toBool();
  const auto s = shape_of(cx, recurrent::kLstmGates);
  if (!s.has_value() || !usable(kept) || !is_of(cy, cx.sizes()) || !is_of(of_hy, cx.sizes()) ||
      !is_of(of_cy, cx.sizes())) {
    const Span span(Kind::fallback, "aten::_thnn_fused_lstm_cell_backward_impl");
    const auto gates = for_cpu(kept).chunk(4, 1);
    const Tensor &input = gates[0], &forget = gates[1], &state = gates[2], &output = gates[3];
    const Tensor shown = for_cpu(cy).tanh();
    const auto or_zero = [&](const std::optional<Tensor>& t) {
      return t.has_value() ? for_cpu(*t) : at::zeros_like(shown);
    };
    const Tensor g = or_zero(of_hy);
    const Tensor of_state = or_zero(of_cy) + g * output * (1 - shown * shown);
    const Tensor of_gates = at::cat({of_state * state * input * (1 - input),
                                     of_state * for_cpu(cx) * forget * (1 - forget),
                                     of_state * input * (1 - state * state),
                                     g * shown * output * (1 - output)},
                                    1);
    call.finish({to_device(of_gates), to_device(of_state * forget),
                 has_bias ? to_device(of_gates.sum(0)) : Tensor()});
    return true;
  }
  const std::optional<Tensor> first = packed(of_hy), second = packed(of_cy);
  const Tensor old = dense(cx), now = dense(cy), gates = dense(kept);
  const Tensor of_gates = made(*s, recurrent::kLstmGates, cx), of_cx = made(*s, 1, cx);
  launch("lstm_cell_backward", bytes(*s, 13), [&] {
    recurrent::lstm_backward(of_gates.mutable_data_ptr<float>(), of_cx.mutable_data_ptr<float>(),
                             data(first), data(second), data(old), data(now), data(gates), *s,
                             qpus());
  });
  call.finish({of_gates, of_cx, has_bias ? of_gates.sum(0) : Tensor()});
  return true;
}

bool gru_cell(Call& call) {
  const Cell cell(call);
  const auto s = cell.shape(recurrent::kGruGates, recurrent::kGruKept);
  if (!s.has_value()) {
    const Span span(Kind::fallback, "aten::_thnn_fused_gru_cell");
    const auto a = cell.parts_of_input(3), b = cell.parts_of_hidden(3);
    const Tensor hx = for_cpu(cell.state);
    const Tensor reset = (a[0] + b[0]).sigmoid(), update = (a[1] + b[1]).sigmoid();
    const Tensor fresh = (a[2] + reset * b[2]).tanh();
    call.finish({to_device(fresh + update * (hx - fresh)),
                 to_device(at::cat({reset, update, fresh, hx, b[2]}, 1))});
    return true;
  }
  const Tensor hx = dense(cell.state);
  const Tensor hy = made(*s, 1, hx), kept = made(*s, recurrent::kGruKept, hx);
  cell.with_gates([&](const recurrent::Gates& gates) {
    launch("gru_cell", bytes(*s, 13), [&] {
      recurrent::gru(hy.mutable_data_ptr<float>(), kept.mutable_data_ptr<float>(), gates, data(hx),
                     *s, qpus());
    });
  });
  call.finish({hy, kept});
  return true;
}

// Arguments: gradient of hy, saved values, whether there are biases.
bool gru_cell_backward(Call& call) {
  const Tensor &of_hy = call.tensor(0), &kept = call.tensor(1);
  const bool has_bias = call[2].toBool();
  const auto s = shape_of(of_hy, recurrent::kGruKept);
  if (!s.has_value() || !usable(kept)) {
    const Span span(Kind::fallback, "aten::_thnn_fused_gru_cell_backward");
    const Tensor g = for_cpu(of_hy);
    const auto keep = for_cpu(kept).chunk(recurrent::kGruKept, 1);
    const Tensor &reset = keep[0], &update = keep[1], &fresh = keep[2];
    const Tensor of_new = g * (1 - update) * (1 - fresh * fresh);
    const Tensor of_update = g * (keep[3] - fresh) * update * (1 - update);
    const Tensor of_reset = of_new * keep[4] * reset * (1 - reset);
    const Tensor of_input = at::cat({of_reset, of_update, of_new}, 1);
    const Tensor of_hidden = at::cat({of_reset, of_update, of_new * reset}, 1);
    const auto sum = [&](const Tensor& t) { return has_bias ? to_device(t.sum(0)) : Tensor(); };
    call.finish({to_device(of_input), to_device(of_hidden), to_device(g * update), sum(of_input),
                 sum(of_hidden)});
    return true;
  }
  const Tensor gradient = dense(of_hy), keep = dense(kept);
  const Tensor of_input = made(*s, recurrent::kGruGates, gradient);
  const Tensor of_hidden = made(*s, recurrent::kGruGates, gradient), of_hx = made(*s, 1, gradient);
  launch("gru_cell_backward", bytes(*s, 13), [&] {
    recurrent::gru_backward(of_input.mutable_data_ptr<float>(), of_hidden.mutable_data_ptr<float>(),
                            of_hx.mutable_data_ptr<float>(), data(gradient), data(keep), *s,
                            qpus());
  });
  call.finish({of_input, of_hidden, of_hx, has_bias ? of_input.sum(0) : Tensor(),
               has_bias ? of_hidden.sum(0) : Tensor()});
  return true;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", kernel<lstm_cell>());
  m.impl("_thnn_fused_lstm_cell_backward_impl", kernel<lstm_cell_backward>());
  m.impl("_thnn_fused_gru_cell", kernel<gru_cell>());
  m.impl("_thnn_fused_gru_cell_backward", kernel<gru_cell_backward>());
}

}  // namespace
}  // namespace torch_qpu
