// Kernels that move elements, add rows and select elements. Independent of torch. The
// requirements of learning.h apply.
#ifndef TORCH_QPU_MOVES_H
#define TORCH_QPU_MOVES_H

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_qpu::learning {

// `length` elements that are consecutive in both the source and the destination.
struct Run {
  float* to = nullptr;
  const float* from = nullptr;
  int length = 0;
};
// Copies all runs in one launch. A range that is written must not overlap any other range.
void copy_runs(const std::vector<Run>& runs, int qpus);

// out[row] = the sum of in[i] over the indices in places[row]; rows without indices are 0.
// All rows have `columns` elements.
void sum_rows(float* out, const float* in, const std::vector<std::vector<int>>& places,
              int columns, int qpus);

enum class Comparison : std::uint8_t { greater, greater_or_equal, equal, not_equal };

// An operand: n elements, or the same number for all with `one`.
struct Compared {
  const float* data = nullptr;
  bool one = false;
};
// One byte per element, 1 if the comparison holds as defined by IEEE 754. The size of `out`
// is a multiple of 4, and whole words of it are written.
void compare(Comparison what, void* out, const Compared& a, const Compared& b, int n, int qpus);

// out[i] = condition[i] ? a[i] factor : b[i]; conditions are bytes. The size of `condition` is
// a multiple of 4, and whole words of it are read.
void choose(float* out, const void* condition, const Compared& a, float factor, const Compared& b,
            int n, int qpus);

}  // namespace torch_qpu::learning

#endif
