// Products of many small matrices in one launch. Independent of torch. The requirements of
// learning.h apply.
#ifndef TORCH_QPU_BATCHES_H
#define TORCH_QPU_BATCHES_H

namespace torch_qpu::learning {

// A batch of matrices: element (i, j) of matrix b is at data + b * batch + i * row + j * column.
// All strides must fit in 24 bits.
struct Batch {
  const float* data = nullptr;
  int batch = 0;
  int row = 0;
  int column = 1;
};

// c = alpha a b for each of `count` matrices of m x k and k x n; c is dense.
void multiply(float* c, const Batch& a, const Batch& b, int count, int m, int n, int k,
              float alpha, int qpus);

}  // namespace torch_qpu::learning

#endif
