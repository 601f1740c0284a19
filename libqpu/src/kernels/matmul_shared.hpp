// The part of a product for which one QPU can load `b` while all other QPUs compute.
#ifndef QPU_SRC_KERNELS_MATMUL_SHARED_HPP
#define QPU_SRC_KERNELS_MATMUL_SHARED_HPP

#include "kernels/matmul.hpp"

namespace qpu::kernels {

constexpr int kSharedWorkers = kMostQpus - 1;

// The number of first rows and first columns of `c` that this kernel can compute. Both are 0 if
// the kernel is not suitable. The kernel uses all QPUs.
struct Shared {
  int rows = 0;
  int columns = 0;
};
Shared shareable(const Product& p, int qpus);

// Computes such a part p. Does not support productByTables.
void sharedProduct(const Product& p);

}  // namespace qpu::kernels

#endif
