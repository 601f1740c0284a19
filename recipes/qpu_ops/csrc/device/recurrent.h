// The cells of recurrent networks on the QPUs, with their gradients. This file does not depend on
// torch or on QPULib. Only recurrent.cpp uses QPULib's macros.
//
// Arrays must be dense and in shared memory. An array has the shape [rows][columns]. An array for
// gates has the shape [rows][gates * columns]. Biases have one row. If the pointer is null, the
// biases are 0. `qpus` is 1 to 12, or 0 for all QPUs. Callers must ensure that `rows`, and
// `columns` times the number of gates, fit in 24 bits, and that arrays have fewer than 2^28
// elements. All functions can throw qpu::Error and OutOfMemory.
#ifndef TORCH_QPU_RECURRENT_H
#define TORCH_QPU_RECURRENT_H

namespace torch_qpu::recurrent {

struct Shape {
  int rows = 0;
  int columns = 0;
};

constexpr int kLstmGates = 4;  // input, forget, cell, output
constexpr int kGruGates = 3;   // reset, update, new
constexpr int kGruKept = 5;    // the gates, the old state, and the hidden part of the new gate

// The terms of the gates' sums, before the activation.
struct Gates {
  const float* input = nullptr;
  const float* hidden = nullptr;
  const float* input_bias = nullptr;
  const float* hidden_bias = nullptr;
};

// Computes cy = forget cx + input cell and hy = output tanh(cy). The activated gates are written
// to `kept`.
void lstm(float* hy, float* cy, float* kept, const Gates& gates, const float* cx,
          const Shape& shape, int qpus);
// Computes the gradients of the gates' sums and of cx from the gradients of hy and cy. A null
// gradient means 0.
void lstm_backward(float* of_gates, float* of_cx, const float* of_hy, const float* of_cy,
                   const float* cx, const float* cy, const float* kept, const Shape& shape,
                   int qpus);

// Computes hy = (1 - update) new + update hx, where new = tanh(input part + reset * hidden
// part).
void gru(float* hy, float* kept, const Gates& gates, const float* hx, const Shape& shape,
         int qpus);
// Computes the gradients of the input sums, of the hidden sums and of hx from the gradient of hy.
void gru_backward(float* of_input, float* of_hidden, float* of_hx, const float* of_hy,
                  const float* kept, const Shape& shape, int qpus);

}  // namespace torch_qpu::recurrent

#endif
