// Softmax of rows. Each row is computed by one QPU. Rows of up to four vectors stay in registers.
// Longer rows are read twice: first for the maximum and the sum of the exponentials, and then for
// the results.
#include <limits>

#include "kernels/host.hpp"
#include "qpu/ieee.h"
#include "qpu/stream.h"

namespace qpu::kernels {
namespace {

// Returns the reciprocal of the sum of a row's exponentials, in all elements. The result is NaN if
// an element is NaN or +Inf, or if all elements are -Inf. `size` contains the bits of the greatest
// magnitude among the row's elements.
Float factorOf(const FloatExpr& total, const Int& size) {
  Float sum = sumOf(total);
  return select(maxOf(size) > ieee::kInf || sum == 0 || asInt(sum) == ieee::kInf, ieee::nan(),
                reciprocal(sum));
}
// Returns x * factor, or NaN if the factor is NaN, because the product of NaN and a number would
// be Inf.
Float scaled(const FloatExpr& x, const Float& factor) {
  return ieee::keepNan(factor, x * factor);
}

void shortRows(Int rows, Int columns, Ptr<Float> out, Ptr<Float> a, Int rowStride) {
  std::array<Int, kShort> lane;
  for (int j = 0; j < kShort; ++j)
    lane[static_cast<std::size_t>(j)] = min(index() + 16 * j, columns - 1);
  For (Int row = me(), row < rows, row = row + numQPUs())
    Ptr<Float> from = a + row * rowStride;
    std::array<Float, kShort> x;
    for (const Int& l : lane) gather(from + l);
    for (Float& v : x) receive(v);
    // The last vectors contain copies of the last element, which do not change the maximum.
    Float most = maxOf(max(max(x[0], x[1]), max(x[2], x[3])));
    Int size = 0;
    for (const Float& v : x) size = max(size, ieee::magnitude(v));
    int j = 0;
    for (Float& v : x) v = select(index() + 16 * j++ < columns, exp(v - most), 0);
    Float factor = factorOf((x[0] + x[1]) + (x[2] + x[3]), size);
    Ptr<Float> to = out + row * rowStride;
    for (j = 0; j < kShort; ++j) {
      If (columns > 16 * j)
        store(scaled(x[static_cast<std::size_t>(j)], factor), to + 16 * j,
              min(columns - 16 * j, 16));
      End
    }
  End
}

template <int Length>
void longRows(Int rows, Int columns, Ptr<Float> out, Ptr<Float> a, Int rowStride) {
  Int vpmRow = firstVpmRow<Length>();
  For (Int row = me(), row < rows, row = row + numQPUs())
    Pointers<1> from;
    from[0] = a + row * rowStride;
    // For each of the 16 elements: the maximum so far, and the sum of the exponentials relative to
    // this maximum. Elements that are -Inf stay below the initial value of the maximum, and their
    // exponentials are 0.
    Float most = -std::numeric_limits<float>::max();
    Sum sum;
    Int size = 0;
    const auto raise = [&](const FloatExpr& to) {
      Float raised = max(most, to);
      If (any(raised > most))
        Float factor = exp(most - raised);
        sum.total = sum.total * factor;
        sum.lost = sum.lost * factor;
        most = raised;
      End
    };
    // Use short blocks for every Length, because the block size determines the order of the
    // additions.
    std::array<Float, kShort> x;
    walk<1, kShort>(
        columns, from, 0, 1,
        [&](int j, Vectors<1>& v) { x[static_cast<std::size_t>(j)] = v[0]; },
        [&](const IntExpr&) {
          raise(max(max(x[0], x[1]), max(x[2], x[3])));
          for (Float& v : x) {
            size = max(size, ieee::magnitude(v));
            v = exp(v - most);
          }
          sum.add((x[0] + x[1]) + (x[2] + x[3]));
        },
        [&](Vectors<1>& v, const Int&, const Int& count) {
          raise(v[0]);
          size = max(size, ieee::magnitude(v[0]));
          sum.add(select(index() < count, exp(v[0] - most), 0));
        });
    Float all = maxOf(most);
    Float factor = factorOf((sum.total - sum.lost) * exp(most - all), size);

    Ptr<Float> to = out + row * rowStride;
    std::array<Float, Length> result;
    walk<1, Length>(
        columns, from, 0, 1,
        [&](int j, Vectors<1>& v) {
          result[static_cast<std::size_t>(j)] = scaled(exp(v[0] - all), factor);
        },
        [&](const IntExpr& first) { burst(result, to + first, vpmRow); },
        [&](Vectors<1>& v, const Int& first, const Int& count) {
          finishBursts();
          store(scaled(exp(v[0] - all), factor), to + first, count);
        });
    finishBursts();
  End
}

}  // namespace

void softmax(Floats out, Floats a, int rows, int columns, int rowStride, int qpus) {
  requireSize("softmax", "rows", rows);
  requireSize("softmax", "columns", columns);
  if (rows > 1 && rowStride < columns)
    fail("softmax", "the row stride is " + std::to_string(rowStride) + ", but must be at least " +
                        std::to_string(columns) + ", the number of columns");
  requireMatrix("softmax", "out", Matrix(out, rowStride), rows, columns);
  requireMatrix("softmax", "a", Matrix(a, rowStride), rows, columns);
  requireFactor("softmax", "rows", rows);
  requireFactor("softmax", "the row stride", rowStride);
  if (rows == 0 || columns == 0) return;
  if (columns <= 16 * kShort) {
    static const auto kernel = compile(shortRows, "softmax-short");
    run(kernel, qpus, rows, columns, out, a, rowStride);
  } else if (mayBeLong(qpus) && longPays(columns)) {
    static const auto kernel = compile(longRows<kLong>, "softmax");
    run(kernel, orLong(qpus), rows, columns, out, a, rowStride);
  } else {
    static const auto kernel = compile(longRows<kShort>, "softmax");
    run(kernel, qpus, rows, columns, out, a, rowStride);
  }
}

}  // namespace qpu::kernels
