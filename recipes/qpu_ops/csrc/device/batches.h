// Products of many small matrices in a single launch. This file does not depend on torch. The
// requirements in learning.h apply.
#ifndef TORCH_QPU_BATCHES_H
#define TORCH_QPU_BATCHES_H

namespace torch_qpu::learning {

// A batch of matrices. Element (i, j) of matrix number b is at data + b * batch + i * row + j *
// column. All strides must fit in 24 bits.
struct Batch {
  const float* data = nullptr;
  int batch = 0;
  int row = 0;
  int column = 1;
};

// Computes c = alpha a b for each of `count` pairs of matrices of m x k and k x n elements. c is
// dense.
void multiply(float* c, const Batch& a, const Batch& b, int count, int m, int n, int k,
              float alpha, int qpus);

}  // namespace torch_qpu::learning

#endif
