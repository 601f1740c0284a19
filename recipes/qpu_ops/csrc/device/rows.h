// Kernels that process the rows or columns of a matrix: layer normalisation with its gradients,
// sums, and the greatest element of each row. This file does not depend on torch. The requirements in
// learning.h apply.
#ifndef TORCH_QPU_ROWS_H
#define TORCH_QPU_ROWS_H

namespace torch_qpu::learning {

// For each row, computes out = (a - mean) spread weight + bias, where `mean` is the mean of the row
// and spread = 1 / sqrt(variance + epsilon). The function also stores `mean` and `spread`. `weight`
// and `bias` contain one number per column. If `weight` is null, the weights are 1. If `bias` is
// null, the biases are 0.
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

// Computes those gradients whose pointers are not null.
struct LayerNormGradient {
  float* of_a = nullptr;
  float* of_weight = nullptr;
  float* of_bias = nullptr;
  const float* gradient = nullptr;
  const float* a = nullptr;
  const float* mean = nullptr;
  const float* spread = nullptr;
  const float* weight = nullptr;  // null means that all weights are 1
  int rows = 0;
  int columns = 0;
};
// Returns the number of kernels that layer_norm_backward() launches for column sums.
int kernels_of(const LayerNormGradient& of);
void layer_norm_backward(const LayerNormGradient& of, int qpus);

// Computes the sum of each column. Element (i, j) of the matrix is at a + i * row_stride + j *
// column_stride. Rounding errors are corrected, so the error does not grow with the number of rows.
// The matrix must not be empty. The strides must fit in 24 bits.
void sum_columns(float* out, const float* a, int rows, int columns, int row_stride,
                 int column_stride, int qpus);
// Computes the sum of each row, with the same correction of rounding errors as sum_columns(). The
// elements of a row are consecutive. matvec() is faster for short rows.
void sum_long_rows(float* out, const float* a, int rows, int columns, int row_stride, int qpus);

// Finds the greatest element of each row, or the least if `least` is true, and its column. If the
// greatest (or least) value occurs several times, the first occurrence is returned. NaN is treated
// as greater (or less, if `least` is true) than all other values. -0 and +0 are equal.
void extremes(float* values, int* columns_of, const float* a, int rows, int columns, bool least,
              int qpus);

}  // namespace torch_qpu::learning

#endif
