// The part of a product that one QPU can load b for, while all others compute.
#ifndef QPU_SRC_KERNELS_MATMUL_SHARED_HPP
#define QPU_SRC_KERNELS_MATMUL_SHARED_HPP

#include "kernels/matmul.hpp"

namespace qpu::kernels {

constexpr int kSharedWorkers = kMostQpus - 1;

// So many rows of c, from the first on, and so many columns; none of either where this
// way does not suit. It takes all QPUs.
struct Shared {
  int rows = 0;
  int columns = 0;
};
Shared shareable(const Product& p, int qpus);

// p is such a part. Not productByTables.
void sharedProduct(const Product& p);

}  // namespace qpu::kernels

#endif
