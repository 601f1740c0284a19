// The part of a product for which one QPU can load b while all other QPUs compute.
#ifndef QPU_SRC_KERNELS_MATMUL_SHARED_HPP
#define QPU_SRC_KERNELS_MATMUL_SHARED_HPP

#include "kernels/matmul.hpp"

namespace qpu::kernels {

constexpr int kSharedWorkers = kMostQpus - 1;

// Number of rows of c, and of columns, that this kernel can compute, from the first ones. Both
// are 0 if it is not suitable. It uses all QPUs.
struct Shared {
  int rows = 0;
  int columns = 0;
};
Shared shareable(const Product& p, int qpus);

// Computes such a part p. Not for productByTables.
void sharedProduct(const Product& p);

}  // namespace qpu::kernels

#endif
