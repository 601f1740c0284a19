// Kernels over the rows of a matrix: layer normalisation with its gradients, and the greatest
// element of each row. Independent of torch. The requirements of learning.h apply.
#ifndef TORCH_QPU_ROWS_H
#define TORCH_QPU_ROWS_H

namespace torch_qpu::learning {

// out = (a - mean) spread weight + bias for each row, with the row's mean and
// spread = 1 / sqrt(variance + epsilon), which are stored too. weight and bias have
// one number per column, or are null for 1 and 0.
struct LayerNorm {
  float* out = nullptr;
  float* mean = nullptr;
  float* spread = nullptr;
  const float* a = nullptr;
  const float* weight = nullptr;
  const float* bias = nullptr;
  float epsilon = 0;
  int rows = 0;
  int columns = 0;
};
void layer_norm(const LayerNorm& norm, int qpus);

// Computes the gradients whose pointers are not null.
struct LayerNormGradient {
  float* of_a = nullptr;
  float* of_weight = nullptr;
  float* of_bias = nullptr;
  const float* gradient = nullptr;
  const float* a = nullptr;
  const float* mean = nullptr;
  const float* spread = nullptr;
  const float* weight = nullptr;  // null for 1
  int rows = 0;
  int columns = 0;
};
// The number of kernels that column_sums() launches.
int kernels_of(const LayerNormGradient& of);
void layer_norm_backward(const LayerNormGradient& of, int qpus);

// The greatest element of each row, or the least with `least`, and its column: the first if
// several are equal. NaN counts as greater (less) than all other numbers, -0 equals +0.
void extremes(float* values, int* columns_of, const float* a, int rows, int columns, bool least,
              int qpus);

}  // namespace torch_qpu::learning

#endif
