// The product of two matrices, by libqpu's kernel library, which tells no model's figure of its kernels.
#include "kernel.hpp"

#include <qpu/kernels.h>

PITORCH_KERNEL(arrays) {
  using qpu::kernels::Floats;
  using qpu::kernels::Matrix;
  const int m = arrays.dimension(0, 0), k = arrays.dimension(0, 1), n = arrays.dimension(1, 1);
  qpu::kernels::matmul(Matrix(Floats(arrays.floats(2)), n), Matrix(Floats(arrays.floats(0)), k),
                       Matrix(Floats(arrays.floats(1)), n), m, n, k);
  return pitorch::NO_MODEL;
}
