#include "batches.h"

#include "kernel_parts.h"

namespace torch_qpu::learning {
namespace {

constexpr int kTileRows = 8;
constexpr int kUnrolled = 4;  // number of values of k per iteration

// A QPU computes tiles of 8 rows by 16 columns. In each iteration, a QPU uses two vectors of a and,
// for each value of k, a row of b. Each vector of a contains 4 rows by 4 values of k, and its
// elements are broadcast. The tiles are distributed round-robin among the QPUs, matrix by matrix.
void multiply_batch(Int count, Int m, Int n, Int k, Ptr<Float> c, Ptr<Float> a, Int batch_a,
                    Int row_a, Int column_a, Ptr<Float> b, Int batch_b, Int row_b, Int column_b,
                    Float alpha) {
  Int row = me() * kTileRows, column = 0, matrix = 0;
  Int rows = (m + (kTileRows - 1)) & -kTileRows;
  const auto settle = [&] {
    While (row >= rows)
      row = row - rows;
      column = column + 16;
      If (column >= n)
        column = 0;
        matrix = matrix + 1;
      End
    End
  };
  settle();
  While (matrix < count)
    Int lane_k = index() & 3;
    std::array<Ptr<Float>, 2> from_a;
    for (int half = 0; half < 2; ++half)
      from_a[static_cast<std::size_t>(half)] =
          a + (matrix * batch_a + min(row + (index() >> 2) + 4 * half, m - 1) * row_a);
    Ptr<Float> from_b = b + (matrix * batch_b + min(column + index(), n - 1) * column_b);
    const auto request = [&](const Int& first) {
      Int at_k = min(first + lane_k, k - 1) * column_a;
      for (const Ptr<Float>& p : from_a) gather(p + at_k);
      for (int i = 0; i < kUnrolled; ++i) gather(from_b + min(first + i, k - 1) * row_b);
    };
    std::array<Float, kTileRows> sum;
    for (Float& s : sum) s = 0;
    Int first = 0;
    request(first);
    While (first < k)
      std::array<Float, 2> x;
      std::array<Float, kUnrolled> y;
      for (Float& v : x) receive(v);
      for (Float& v : y) receive(v);
      for (Float& v : x) v = qpu::select(first + lane_k < k, v, 0);
      first = first + kUnrolled;
      request(first);
      for (int i = 0; i < kUnrolled; ++i)
        for (int r = 0; r < kTileRows; ++r) {
          Float& s = sum[static_cast<std::size_t>(r)];
          s = s + broadcast(x[static_cast<std::size_t>(r / 4)], r % 4 * 4 + i) *
                      y[static_cast<std::size_t>(i)];
        }
    End
    Float unused;
    for (int i = 0; i < 2 + kUnrolled; ++i) receive(unused);
    Ptr<Float> to = c + ((matrix * m + row) * n + column);
    Int left = min(n - column, 16);
    for (int r = 0; r < kTileRows; ++r) {
      If (row + r < m)
        store(sum[static_cast<std::size_t>(r)] * alpha, to, left);
      End
      to = to + n;
    }
    row = row + numQPUs() * kTileRows;
    settle();
  End
}

}  // namespace

void multiply(float* c, const Batch& a, const Batch& b, int count, int m, int n, int k,
              float alpha, int qpus) {
  if (count == 0 || m == 0 || n == 0 || k == 0) return;
  static const auto kernel = compile(multiply_batch, "batch-matmul");
  run(kernel, qpus, count, m, n, k, at(c), at(a.data), a.batch, a.row, a.column, at(b.data),
      b.batch, b.row, b.column, alpha);
}

}  // namespace torch_qpu::learning
