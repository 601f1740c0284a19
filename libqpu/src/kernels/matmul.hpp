// The tiled matrix product that matmul and conv2d share.
#ifndef QPU_SRC_KERNELS_MATMUL_HPP
#define QPU_SRC_KERNELS_MATMUL_HPP

#include "kernels/host.hpp"

namespace qpu::kernels {

// c[i][j] = alpha * sum over k of a[i][k] * b(k, j), then + beta * c[i][j] or + bias[i].
struct Product {
  Floats c;
  int cStride = 0;  // of rows; columns are contiguous
  Floats a;
  int aRow = 0;
  int aColumn = 1;
  Floats b;
  // Row k and column j start k * bRow and j * bColumn elements after `b`. For productByTables,
  // tables contain these distances.
  int bRow = 0;
  int bColumn = 0;
  BusPointer<int> rowTable;
  BusPointer<int> columnTable;
  int m = 0, n = 0, k = 0;
  float alpha = 1;
  float beta = 0;
  Floats bias;  // for productByTables
};

// Require m, n > 0.
void product(const Product& p, int qpus);
void productByTables(const Product& p, int qpus);

}  // namespace qpu::kernels

#endif
