// Kernels that move elements, add rows and select elements. This file does not depend on torch.
// The requirements in learning.h apply.
#ifndef TORCH_QPU_MOVES_H
#define TORCH_QPU_MOVES_H

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_qpu::learning {

// A run of `length` elements that are consecutive both in the source and in the destination.
struct Run {
  float* to = nullptr;
  const float* from = nullptr;
  int length = 0;
};
// Returns true if the table that copy_runs() needs for `count` runs is at most one page or at most
// twice as large as `bytes`.
inline bool has_small_table(std::size_t count, std::size_t bytes) {
  constexpr std::size_t entry = 4 * sizeof(int), page = 4096;
  return count * entry <= std::max(page, 2 * bytes);
}
// Copies all runs in a single launch. The destination of a run must not overlap any other source
// or destination.
void copy_runs(const std::vector<Run>& runs, int qpus);

// Sets out[row] to the sum of in[i] over all indices i in places[row]. Rows without indices
// become 0. All rows have `columns` elements.
void sum_rows(float* out, const float* in, const std::vector<std::vector<int>>& places,
              int columns, int qpus);

enum class Comparison : std::uint8_t { greater, greater_or_equal, equal, not_equal };

// An operand of a comparison: n elements or, if `one` is true, a single number for all elements.
struct Compared {
  const float* data = nullptr;
  bool one = false;
};
// Writes one byte per element. The byte is 1 if the comparison holds according to IEEE 754, and 0
// otherwise. The size of `out` must be a multiple of 4, because whole words are written.
void compare(Comparison what, void* out, const Compared& a, const Compared& b, int n, int qpus);

// Computes out[i] = condition[i] ? a[i] factor : b[i]. Conditions are bytes. The size of
// `condition` must be a multiple of 4, because whole words are read.
void choose(float* out, const void* condition, const Compared& a, float factor, const Compared& b,
            int n, int qpus);

}  // namespace torch_qpu::learning

#endif
