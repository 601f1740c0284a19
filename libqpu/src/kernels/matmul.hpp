// The tiled matrix product that matmul and conv2d share.
#ifndef QPU_SRC_KERNELS_MATMUL_HPP
#define QPU_SRC_KERNELS_MATMUL_HPP

#include "kernels/host.hpp"

namespace qpu::kernels {

// Computes c[i][j] = alpha * (sum over k of a[i][k] * b(k, j)), and then adds beta * c[i][j] or
// bias[i].
struct Product {
  Floats c;
  int cStride = 0;  // distance between rows; the columns are contiguous
  Floats a;
  int aRow = 0;
  int aColumn = 1;
  Floats b;
  // Row k starts k * bRow elements after `b`, and column j starts j * bColumn elements after `b`.
  // productByTables() reads these distances from tables instead.
  int bRow = 0;
  int bColumn = 0;
  BusPointer<int> rowTable;
  BusPointer<int> columnTable;
  int m = 0, n = 0, k = 0;
  float alpha = 1;
  float beta = 0;
  Floats bias;  // for productByTables() only
};

// Both functions require m > 0 and n > 0.
void product(const Product& p, int qpus);
void productByTables(const Product& p, int qpus);

}  // namespace qpu::kernels

#endif
