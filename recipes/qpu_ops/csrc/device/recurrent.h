// The cells of recurrent networks on the QPUs, with their gradients. Nothing of torch
// here and nothing of QPULib: its macros stay in recurrent.cpp.
//
// Arrays are dense, in shared memory, [rows][columns] or, of gates, [rows][gates of
// `columns` each]; biases are of one row, or null for 0. `qpus` is 1..12, 0 for all.
// rows, and columns times the gates, have 24 bits, arrays less than 2^28 elements:
// callers see to it. All throw qpu::Error and OutOfMemory.
#ifndef TORCH_QPU_RECURRENT_H
#define TORCH_QPU_RECURRENT_H

namespace torch_qpu::recurrent {

struct Shape {
  int rows = 0;
  int columns = 0;
};

constexpr int kLstmGates = 4;  // input, forget, cell, output
constexpr int kGruGates = 3;   // reset, update, new
constexpr int kGruKept = 5;    // the gates, the old state, and the hidden part of new

// Sums of the gates' parts, before they are activated.
struct Gates {
  const float* input = nullptr;
  const float* hidden = nullptr;
  const float* input_bias = nullptr;
  const float* hidden_bias = nullptr;
};

// cy = forget cx + input cell, hy = output tanh(cy); `kept` gets the activated gates.
void lstm(float* hy, float* cy, float* kept, const Gates& gates, const float* cx,
          const Shape& shape, int qpus);
// From the gradients of hy and cy (null for 0) those of the gates' sums and of cx.
void lstm_backward(float* of_gates, float* of_cx, const float* of_hy, const float* of_cy,
                   const float* cx, const float* cy, const float* kept, const Shape& shape,
                   int qpus);

// hy = (1 - update) new + update hx, new = tanh(its input part + reset its hidden part).
void gru(float* hy, float* kept, const Gates& gates, const float* hx, const Shape& shape,
         int qpus);
// From the gradient of hy those of the input's and the hidden part's sums and of hx.
void gru_backward(float* of_input, float* of_hidden, float* of_hx, const float* of_hy,
                  const float* kept, const Shape& shape, int qpus);

}  // namespace torch_qpu::recurrent

#endif
