// The product of two matrices, computed by libqpu's kernel library.
#include "kernel.hpp"

#include <qpu/kernels.h>

PITORCH_KERNEL(arrays) {
  using qpu::kernels::Floats;
  using qpu::kernels::Matrix;
  const int m = arrays.dimension(0, 0), k = arrays.dimension(0, 1), n = arrays.dimension(1, 1);
  const pitorch::ModelClock clock;
  qpu::kernels::matmul(Matrix(Floats(arrays.floats(2)), n), Matrix(Floats(arrays.floats(0)), k),
                       Matrix(Floats(arrays.floats(1)), n), m, n, k);
  return clock.seconds();
}
