// Matrix-vector multiplication. A task is a group of eight rows in one segment of the columns. For
// each chunk of 128 columns, the corresponding part of x stays in registers while all rows of the
// group are multiplied by this part. A second kernel adds the sums of the segments. The tasks and
// the order of every sum depend only on the shape of the matrix.
#include <algorithm>

#include "kernels/host.hpp"
#include "qpu/stream.h"

namespace qpu::kernels {
namespace {

constexpr int kRows = 8;     // number of rows per group
constexpr int kChunk = 8;    // number of vectors per chunk
constexpr int kColumns = 16 * kChunk;

// Returns -1 where a < b and 0 elsewhere. The difference must not overflow.
IntExpr ifBelow(const IntExpr& a, const IntExpr& b) { return (a - b) >> 31; }

// Computes out[segment * m + row], which is the dot product of x and the row in the segment's
// columns.
void partialProducts(Int m, Int k, Ptr<Float> out, Ptr<Float> a, Int rowStride, Ptr<Float> x,
                     Int groups, Int segments, Int chunksOfSegment) {
  Int chunks = k >> 7;
  Int group = me(), segment = 0;
  While (group >= groups)
    group = group - groups;
    segment = segment + 1;
  End
  While (segment < segments)
    Int row = group << 3;
    Int rows = min(m - row, kRows);
    Int chunk = segment * chunksOfSegment;
    Int end = min(chunk + chunksOfSegment, chunks);
    Ptr<Float> base = a + row * rowStride + index();
    std::array<Float, kRows> sum;
    for (Float& s : sum) s = 0;

    If (chunk < end)
      Ptr<Float> nextX = x + ((chunk << 7) + index());
      Ptr<Float> nextRow = base + (chunk << 7);  // the first row of the group
      Ptr<Float> next = nextRow;
      Int requested = chunk;
      // Number of vectors of x and of all rows in a chunk; x comes first.
      constexpr int stream = kChunk * (kRows + 1);
      const auto request = [&](int position) {
        const int r = position % stream / kChunk - 1;
        const int j = position % kChunk;
        if (position == stream) {
          requested = requested + 1;
          Int move = ifBelow(requested, end) & kColumns;
          nextX = nextX + move;
          nextRow = nextRow + move;
        }
        if (r < 0) {
          gather(nextX + 16 * j);
          return;
        }
        // Rows beyond the end are replaced by the last row.
        if (r == 0 && j == 0) next = nextRow;
        if (r > 0 && j == 0) next = next + (rowStride & ifBelow(r, rows));
        gather(next + 16 * j);
      };
      for (int p = 0; p < kInFlight; ++p) request(p);
      While (chunk < end)
        std::array<Float, kChunk> part;
        for (int j = 0; j < kChunk; ++j) {
          receive(part[static_cast<std::size_t>(j)]);
          request(j + kInFlight);
        }
        for (int r = 0; r < kRows; ++r) {
          Float product;
          for (int j = 0; j < kChunk; ++j) {
            Float v;
            receive(v);
            request((r + 1) * kChunk + j + kInFlight);
            const Float& p = part[static_cast<std::size_t>(j)];
            product = j == 0 ? v * p : product + v * p;
          }
          Float& s = sum[static_cast<std::size_t>(r)];
          s = s + product;
        }
        chunk = chunk + 1;
      End
      Float unused;
      for (int p = 0; p < kInFlight; ++p) receive(unused);
    End

    // The last segment also contains the columns after the last complete chunk.
    Int column = select(segment == segments - 1, chunks << 7, k);
    For (Int c = column, c < k, c = c + 16)
      Int count = min(k - c, 16);
      Int lane = min(index(), count - 1) - index();
      Float v;
      Ptr<Float> next = base + (c + lane);
      gather(x + (c + min(index(), count - 1)));
      gather(next);
      Float p;
      receive(p);
      p = select(index() < count, p, 0);
      for (int r = 0; r < kRows; ++r) {
        next = next + (rowStride & ifBelow(r + 1, rows));
        gather(next);
        receive(v);
        Float& s = sum[static_cast<std::size_t>(r)];
        // Elements beyond the end can be Inf. On a QPU, however, the product of Inf and the zeros
        // in x is 0.
        s = s + v * p;
      }
      receive(v);
    End

    Float result = 0;
    for (int r = 0; r < kRows; ++r) {
      Float total = sumOf(sum[static_cast<std::size_t>(r)]);
      Where (index() == r)
        result = total;
      End
    }
    store(result, out + (segment * m + row), rows);

    group = group + numQPUs();
    While (group >= groups)
      group = group - groups;
      segment = segment + 1;
    End
  End
}

// Computes out[i], which is the sum over all s of parts[s * m + i].
void joinSegments(Int m, Int segments, Ptr<Float> out, Ptr<Float> parts) {
  For (Int i = me() << 4, i < m, i = i + (numQPUs() << 4))
    Int count = min(m - i, 16);
    Ptr<Float> p = parts + (i + min(index(), count - 1));
    Float sum = 0;
    For (Int s = 0, s < segments, s = s + 2)
      // If the number of parts is odd, the last part is requested twice but counted only once.
      Int more = ifBelow(s + 1, segments);
      gather(p);
      p = p + (m & more);
      gather(p);
      p = p + m;
      Float one, other;
      receive(one);
      receive(other);
      sum = sum + one;
      sum = sum + asFloat(asInt(other) & more);
    End
    store(sum, out + i, count);
  End
}

// Returns the number of column segments. The number is small, but large enough to give all QPUs
// about the same number of tasks.
int segmentsFor(int groups, int chunks) {
  int best = 1;
  double bestShare = 0;
  for (int s = 1; s <= std::min(kMostQpus, std::max(chunks, 1)); ++s) {
    const int tasks = groups * s;
    const int rounds = (tasks + kMostQpus - 1) / kMostQpus;
    const double share = static_cast<double>(tasks) / (kMostQpus * rounds);
    if (share > bestShare + 0.05) {
      best = s;
      bestShare = share;
    }
  }
  return best;
}

}  // namespace

void matvec(Floats y, Matrix a, Floats x, int m, int k, int qpus) {
  requireSize("matvec", "m", m);
  requireSize("matvec", "k", k);
  requireRange("matvec", "y", y, m);
  requireRange("matvec", "x", x, k);
  requireMatrix("matvec", "a", a, m, k);
  requireFactor("matvec", "m", m);
  requireFactor("matvec", "a's row stride", a.rowStride);
  if (m == 0) return;
  if (a.columnStride != 1) {
    // Multiply the row vector x by the transpose of the matrix.
    matmul(Matrix(y, m), Matrix(x, k), Matrix(a.data, a.columnStride, a.rowStride), 1, m, k, 1, 0,
           qpus);
    return;
  }
  static const auto products = compile(partialProducts, "matvec");
  static const auto join = compile(joinSegments, "matvec-join");
  const int groups = (m + kRows - 1) / kRows;
  const int chunks = k / kColumns;
  const int segments = segmentsFor(groups, chunks);
  const int each = (chunks + segments - 1) / segments;
  // The address of an empty matrix can be invalid, but it is not read.
  const Floats from = k == 0 ? y : a.data;
  const Floats by = k == 0 ? y : x;
  if (segments == 1) {
    run(products, qpus, m, k, y, from, a.rowStride, by, groups, segments, each);
    return;
  }
  const Scratch parts(static_cast<std::size_t>(m) * static_cast<std::size_t>(segments));
  run(products, qpus, m, k, parts.floats(), from, a.rowStride, by, groups, segments, each);
  run(join, qpus, m, segments, y, parts.floats());
}

}  // namespace qpu::kernels
