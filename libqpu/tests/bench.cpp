// Measures the time of matrix-vector multiplications on 4 QPUs of the current backend. The matrices
// have 100 rows and 10^0 .. 10^5 columns. Only the call itself is measured. The interpreter's times
// do not predict the hardware's times.
#include <chrono>
#include <cstdio>

#include "tests/naive.hpp"

int main() {
  constexpr int rows = 100;
  auto kernel = compile(naive::matrixVector, "matrixVector");
  kernel.setNumQPUs(4);
  (void)std::printf("libqpu %s, backend %s, 4 QPUs, %d rows\n%8s  %12s  %10s\n", qpu::version(),
                    qpu::backend().name, rows, "columns", "seconds", "Mflop/s");
  for (int columns = 1; columns <= 100000; columns *= 10) {
    const int padded = (columns + 15) / 16 * 16;
    const auto width = static_cast<std::size_t>(padded);
    SharedArray<float> matrix(rows * width);
    SharedArray<float> vector(width);
    SharedArray<float> sums(rows * 16U);
    for (float& x : matrix) x = 0.5F;
    for (int i = 0; i < columns; ++i) vector[i] = 0.25F;
    const auto start = std::chrono::steady_clock::now();
    kernel(rows, padded, &matrix, &vector, &sums);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    float last = 0;
    for (int i = 0; i < 16; ++i) last += sums[16 * (rows - 1) + i];
    if (last != static_cast<float>(columns) * 0.125F) {
      (void)std::fprintf(stderr, "wrong sum %g for %d columns\n", static_cast<double>(last),
                         columns);
      return 1;
    }
    (void)std::printf("%8d  %12.6f  %10.1f\n", columns, taken.count(),
                      2e-6 * rows * columns / taken.count());
  }
  return 0;
}
