// Softmax of rows, one QPU per row. Rows of up to four vectors stay in registers;
// longer ones are read three times: for the greatest element, the sum of the
// powers, and the results.
#include <limits>

#include "kernels/host.hpp"
#include "kernels/stream.hpp"

namespace qpu::kernels {
namespace {

constexpr float kLeast = -std::numeric_limits<float>::infinity();

void shortRows(Int rows, Int columns, Ptr<Float> out, Ptr<Float> a, Int rowStride) {
  std::array<Int, kVectors> lane;
  for (int j = 0; j < kVectors; ++j)
    lane[static_cast<std::size_t>(j)] = min(index() + 16 * j, columns - 1);
  For (Int row = me(), row < rows, row = row + numQPUs())
    Ptr<Float> from = a + row * rowStride;
    std::array<Float, kVectors> x;
    for (const Int& l : lane) gather(from + l);
    for (Float& v : x) receive(v);
    // Copies of the last element do not change the maximum.
    Float most = maxOf(max(max(x[0], x[1]), max(x[2], x[3])));
    int j = 0;
    for (Float& v : x) v = select(index() + 16 * j++ < columns, exp(v - most), 0);
    Float factor = reciprocal(sumOf((x[0] + x[1]) + (x[2] + x[3])));
    Ptr<Float> to = out + row * rowStride;
    for (j = 0; j < kVectors; ++j) {
      If (columns > 16 * j)
        store(x[static_cast<std::size_t>(j)] * factor, to + 16 * j, min(columns - 16 * j, 16));
      End
    }
  End
}

void longRows(Int rows, Int columns, Ptr<Float> out, Ptr<Float> a, Int rowStride) {
  For (Int row = me(), row < rows, row = row + numQPUs())
    Pointers<1> from;
    from[0] = a + row * rowStride;
    Float most = kLeast;
    walk<1>(
        columns, from, 0, 1, [&](int, Vectors<1>& x) { most = max(most, x[0]); },
        [](const Int&) {},
        [&](Vectors<1>& x, const Int&, const Int&) { most = max(most, x[0]); });
    most = maxOf(most);

    std::array<Sum, 2> sums;
    walk<1>(
        columns, from, 0, 1,
        [&](int j, Vectors<1>& x) { sums[static_cast<std::size_t>(j % 2)].add(exp(x[0] - most)); },
        [](const Int&) {},
        [&](Vectors<1>& x, const Int&, const Int& count) {
          sums[0].add(select(index() < count, exp(x[0] - most), 0));
        });
    sums[0].add(sums[1].total);
    Float factor = reciprocal(sumOf(sums[0].total - (sums[0].lost + sums[1].lost)));

    Ptr<Float> to = out + row * rowStride;
    std::array<Float, kVectors> result;
    walk<1>(
        columns, from, 0, 1,
        [&](int j, Vectors<1>& x) {
          result[static_cast<std::size_t>(j)] = exp(x[0] - most) * factor;
        },
        [&](const Int& b) { burst(result, to + (b << 6)); },
        [&](Vectors<1>& x, const Int& first, const Int& count) {
          finishBursts();
          store(exp(x[0] - most) * factor, to + first, count);
        });
    finishBursts();
  End
}

}  // namespace

void softmax(Floats out, Floats a, int rows, int columns, int rowStride, int qpus) {
  requireSize("softmax", "rows", rows);
  requireSize("softmax", "columns", columns);
  if (rows > 1 && rowStride < columns)
    refuse("softmax", "rows are " + std::to_string(rowStride) + " apart and overlap");
  requireMatrix("softmax", "out", Matrix(out, rowStride), rows, columns);
  requireMatrix("softmax", "a", Matrix(a, rowStride), rows, columns);
  requireFactor("softmax", "rows", rows);
  requireFactor("softmax", "the row stride", rowStride);
  if (rows == 0 || columns == 0) return;
  static const auto inRegisters = compile(shortRows, "softmax-short");
  static const auto inMemory = compile(longRows, "softmax");
  run(columns <= kBlock ? inRegisters : inMemory, qpus, rows, columns, out, a, rowStride);
}

}  // namespace qpu::kernels
