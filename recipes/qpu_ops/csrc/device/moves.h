// Kernels that move elements, add rows and choose among elements. Nothing of torch here.
// Conditions as in learning.h.
#ifndef TORCH_QPU_MOVES_H
#define TORCH_QPU_MOVES_H

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_qpu::learning {

// `length` elements that lie side by side at both ends.
struct Run {
  float* to = nullptr;
  const float* from = nullptr;
  int length = 0;
};
// All runs in one launch. Ranges that are written must not overlap any other.
void copy_runs(const std::vector<Run>& runs, int qpus);

// out[row] = the sum of in[i] over the `places` of the row; rows without places are 0.
// All rows have `columns` elements.
void sum_rows(float* out, const float* in, const std::vector<std::vector<int>>& places,
              int columns, int qpus);

enum class Comparison : std::uint8_t { greater, greater_or_equal, equal, not_equal };

// An operand: n elements, or with `one` the same number for all.
struct Compared {
  const float* data = nullptr;
  bool one = false;
};
// A byte each, 1 where the comparison holds, as IEEE 754 compares. `out` is a multiple of 4,
// and whole words of it are written.
void compare(Comparison what, void* out, const Compared& a, const Compared& b, int n, int qpus);

// out[i] = condition[i] ? a[i] factor : b[i], of bytes. `condition` is a multiple of 4, and
// whole words of it are read.
void choose(float* out, const void* condition, const Compared& a, float factor, const Compared& b,
            int n, int qpus);

}  // namespace torch_qpu::learning

#endif
