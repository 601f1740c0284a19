// A product in which one QPU loads `b` while all other QPUs compute.
#ifndef QPU_SRC_KERNELS_MATMUL_SHARED_HPP
#define QPU_SRC_KERNELS_MATMUL_SHARED_HPP

#include "kernels/matmul.hpp"

namespace qpu::kernels {

constexpr int kSharedWorkers = kMostQpus - 1;

// The numbers of rows and columns of `c`, counted from the first, that the kernel can compute. Both
// numbers are 0 if the kernel is not suitable. The kernel uses all QPUs.
struct Shared {
  int rows = 0;
  int columns = 0;
};
Shared shareable(const Product& p, int qpus);

// Computes a product p whose size shareable() has returned. Does not support tables.
void sharedProduct(const Product& p);

}  // namespace qpu::kernels

#endif
