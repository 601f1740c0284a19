// Matrix product. A QPU computes tiles of 8 rows by 64 columns. A tile's 32 vectors stay in
// registers during the loop over k. Each iteration handles four values of k, with two vectors of
// `a` and 16 vectors of `b`. Each vector of `a` contains 4 rows by 4 values of k, and the vector's
// elements are broadcast one by one. Each vector of `b` is used for all 8 rows. At any time, all
// QPUs compute tiles in the same column of tiles, so that they share the cache lines of `b`.
//
// If `a` is read often, another kernel (packTiles(), which launch() runs) copies it first, so that
// the two vectors of an iteration are adjacent.
//
// A finished tile is written to memory as a unit, through one half of the VPM, because starting a
// DMA transfer costs as much as storing many rows. Two semaphores control access to the halves.
//
// Every sum is computed in the order of k, so the results do not depend on the number of QPUs.
//
// If all QPUs are used, the kernel in matmul_shared.cpp computes most of a large product.
#include "kernels/matmul.hpp"

#include <algorithm>

#include "kernels/matmul_shared.hpp"
#include "kernels/matmul_tile.hpp"

namespace qpu::kernels {
namespace {

constexpr int kDepth = 4;  // number of values of k per iteration
// Number of vectors of `b` that are used before the next values of `a` are received.
constexpr int kEarly = kAcross * (kDepth - 1);
static_assert(kRows == 8 && kDepth == 4,
              "two vectors of a must contain the values of an iteration");

// Values that a QPU saves during the loop over k. The values are elements of one vector, because
// separate variables would occupy one register each.
enum Saved { kRow, kColumn, kFrom, kVpmColumn, kRoundsLeft };

// The semaphores. kHalf and kOtherHalf control access to the halves of the VPM. The other
// semaphores implement the barrier. They signal arrival and the permission to continue, separately
// for even and odd rounds.
enum Semaphore { kHalf, kOtherHalf, kArrived, kContinue, kArrivedOdd, kContinueOdd };
constexpr int kMostRounds = (1 << 22) - 1;

class Tile : public Sums {
 public:
  // The saved values overwrite some elements of `params`.
  Tile(Variant variant, Numbers& params, const Int& row, const Int& column)
      : Sums(variant) {
    // Rows and columns beyond the end of the matrix are replaced by the last row or column.
    Int packed = params.get(kPacked);
    Int laneK = index() & 3 & ~packed;
    for (int half = 0; half < 2; ++half) {
      Int r = min(row + (((index() >> 2) + 4 * half) & ~packed), params.get(kM) - 1);
      rows_[at(half)] = params.get(kA) + ((r * params.get(kARow)) << 2) +
                        (((index() << 2) + 64 * half) & packed);
    }
    beyond_ = laneK - (params.get(kLastK) + 1);
    lastA_ = (params.get(kLastK) * params.get(kAColumn)) << 2;
    from_ = min((laneK * params.get(kAColumn)) << 2, lastA_);
    stepA_ = params.get(kAColumn) << 4;
    if (tables_) {
      lastB_ = params.get(kBRow) + (params.get(kLastK) << 2);
      next_ = min(params.get(kBRow) + (index() << 2), lastB_);
    } else {
      lastB_ = (params.get(kLastK) * params.get(kBRow)) << 2;
      offset_ = min((index() * params.get(kBRow)) << 2, lastB_);
      stepB_ = params.get(kBRow) << 4;
    }
    for (int s = 0; s < kAcross; ++s) {
      Int j = columnsOf(s, params, column);
      if (tables_)
        gather(pointer<Int>(params.get(kBColumn) + (j << 2)));
      else
        columns_[at(s)] = params.get(kB) + ((j * params.get(kBColumn)) << 2);
    }
    if (tables_)
      for (Int& c : columns_) {
        receive(c);
        c = params.get(kB) + (c << 2);
      }
    params.put(kRow, row);
    params.put(kColumn, column);
  }

  void compute() {
    clear();
    // Before the first iteration, load the values of `a` for that iteration, and request the first
    // kInFlight vectors of `b`.
    if (tables_) {
      for (const int which : {0, 1}) requestTable(which);
      receiveTable(offset_);
    }
    for (const int which : {0, 1}) requestA(which);
    std::array<Float, 2> a;
    for (Float& v : a) receive(v);
    take(a);
    for (int p = 0; p < kInFlight; ++p) requestRow(p);
    While (any(beyond_ < 0))
      iterate();
    End
    Float unused;
    for (int p = 0; p < kInFlight; ++p) receive(unused);
  }

  // Writes the tile through eight columns of the VPM. The first of these columns is column `half`.
  void write(const Numbers& params, const Int& row, const Int& column, const Int& half) {
    Float bias;
    if (tables_) {
      Ptr<Float> from = pointer<Float>(params.get(kBeta)) + min(row + index(), params.get(kM) - 1);
      gather(from);
      gather(from);
      receive(bias);
      Float unused;
      receive(unused);
    }
    Int rows = params.get(kM) - row;
    Int width = params.get(kN) - column;
    Ptr<Float> start = pointer<Float>(params.get(kC)) + row * params.get(kCStride);
    If (width >= kColumns)
      If (half == 0)
        semaDec(kHalf);
      Else
        semaDec(kOtherHalf);
      End
      storeWhole(params, start, column, rows, half, bias);
      If (half == 0)
        semaInc(kHalf);
      Else
        semaInc(kOtherHalf);
      End
    Else
      semaDec(kHalf);
      semaDec(kOtherHalf);
      storeNarrow(params, start, column, rows, width, bias);
      semaInc(kHalf);
      semaInc(kOtherHalf);
    End
  }

 private:
  // Returns the numbers of the columns in vector s.
  static IntExpr columnsOf(int s, const Numbers& params, const Int& column) {
    return min(column + (index() + 16 * s), params.get(kN) - 1);
  }

  // requestTable() and receiveTable() handle two requests each. The table is requested twice, so
  // that the number of requests is even.
  void requestTable(int which) {
    gather(pointer<Int>(next_));
    if (which == 1) next_ = min(next_ + 4 * kDepth, lastB_);
  }
  void requestA(int which) {
    gather(pointer<Float>(rows_[at(which)] + from_));
    if (which == 1) from_ = min(from_ + stepA_, lastA_);
  }
  static void receiveTable(Int& offset) {
    Int unused;
    receive(offset);
    receive(unused);
    offset = offset << 2;
  }
  // For values of k beyond the end, the elements of `a` are treated as 0.
  void take(const std::array<Float, 2>& a) {
    Int there = beyond_ >> 31;
    for (std::size_t half = 0; half < 2; ++half) a_[half] = asFloat(asInt(a[half]) & there);
  }
  // Requests vector number `position` in the rows of `b` for the iteration whose data is being
  // requested.
  void requestRow(int position) {
    gather(pointer<Float>(broadcast(offset_, position / kAcross) + columns_[at(position % kAcross)]));
  }

  // Makes the next request after a vector has been used. An iteration uses the rows of `b` in
  // order, and receives `a` for the next iteration before it uses the last row. With tables, an
  // iteration also receives the offsets of the rows of `b` for the iteration after next. After each
  // vector is used, request() requests the vector that is needed kInFlight vectors later.
  void request(int use) {
    const int length = kAcross * kDepth + (tables_ ? 4 : 2);
    int wanted = use + kInFlight;
    if (wanted == length) {
      if (tables_)
        offset_ = offsetAfter_;
      else
        offset_ = min(offset_ + stepB_, lastB_);
    }
    if (wanted >= length) return requestRow(wanted - length);
    if (wanted < kEarly) return requestRow(wanted);
    wanted -= kEarly;
    if (tables_) {
      if (wanted < 2) return requestTable(wanted);
      wanted -= 2;
    }
    if (wanted < 2) return requestA(wanted);
    requestRow(wanted - 2 + kEarly);
  }

  void iterate() {
    int use = 0;
    std::array<Float, 2> nextA;
    beyond_ = beyond_ + kDepth;
    for (int k = 0; k < kDepth; ++k) {
      if (use == kEarly) {
        if (tables_) {
          receiveTable(offsetAfter_);
          request(use++);
          request(use++);
        }
        for (Float& v : nextA) {
          receive(v);
          request(use++);
        }
      }
      std::array<Float, kAcross> b;
      for (Float& v : b) {
        receive(v);
        request(use++);
      }
      for (int r = 0; r < kRows; ++r) {
        Float one = broadcast(a_[at(r / 4)], r % 4 * 4 + k);
        for (int s = 0; s < kAcross; ++s) {
          Float& sum = sum_[at(r)][at(s)];
          sum = sum + one * b[at(s)];
        }
      }
    }
    take(nextA);
  }

  // Values of `a` for the current iteration. Each vector contains four rows.
  std::array<Float, 2> a_;
  std::array<Int, kAcross> columns_;  // addresses of the columns in row 0 of `b`
  std::array<Int, 2> rows_;           // addresses of the rows in `a` for the first iteration
  Int beyond_;                        // index k of the next `a`, minus the number of values of k
  Int from_, stepA_, lastA_;          // distance in bytes from rows_ to the next values of `a`
  // Distances in bytes to the rows of `b` in an iteration, one per element.
  Int offset_, stepB_, lastB_;
  // With tables: offset_ of the next iteration, and the address in the table.
  Int offsetAfter_, next_;
};

// The number of vectors per block of the copy. Each QPU that copies uses four columns of the VPM.
// A column contains four vectors and is written to memory as one row.
constexpr int kPackBlock = 16, kPackColumns = 4;
constexpr int kPackQpus = 16 / kPackColumns;

// Copies `a` to tiles of 8 rows for the product. A tile consists of groups. A group contains 4
// values of k for each of the 8 rows. Values of k beyond the end are 0. `size` must be a multiple
// of 32.
void packTiles(Int tiles, Int m, Int k, Int size, Ptr<Float> out, Ptr<Float> a, Int aRow,
               Int aColumn) {
  Int vpmColumn = me() * kPackColumns;
  const auto put = [&](const std::array<Float, kPackBlock>& x) {
    dmaWaitWrite();
    for (int c = 0; c < kPackColumns; ++c) {
      vpmSetupWrite(VERT, vpmColumn + c, 16);
      for (int j = 0; j < 4; ++j) vpmPut(x[at(4 * c + j)]);
    }
    dmaSetWriteStride(0);
  };
  overBlocks<kPackBlock>(
      tiles, size, out,
      [&](const Int& tile, const IntExpr& first) {
        Int row = tile * kRows + ((first >> 2) & 4) + (index() >> 2);
        Int value = ((first >> 5) << 2) + (index() & 3);
        Ptr<Float> from = a + (min(row, m - 1) * aRow + min(value, k - 1) * aColumn);
        gather(from);
        gather(from);
        Float v, unused;
        receive(v);
        receive(unused);
        return select(value < k, v, 0);
      },
      [&](const std::array<Float, kPackBlock>& x, const Ptr<Float>& to) {
        put(x);
        dmaSetupWrite(VERT, kPackColumns, vpmColumn, kColumns);
        dmaStartWrite(to);
      },
      [&](const std::array<Float, kPackBlock>& x, const Ptr<Float>& to, const Int& left) {
        put(x);
        for (int j = 0; j < kPackBlock; ++j) {
          If (left > 16 * j)
            dmaSetupWrite(VERT, 1, vpmColumn + (256 * (j % 4) + j / 4), 16);
            dmaStartWrite(to + 16 * j);
            dmaWaitWrite();
          End
        }
      });
}

// A barrier for all QPUs. After the barrier, the QPUs read the same rows of `b` at the same time,
// so that the rows are transferred over the bus only once. Consecutive barriers use different
// semaphores, so that a fast QPU cannot acquire a permission that was released for a slow QPU.
void barrier(int arrived, int go) {
  If (me() == 0)
    For (Int others = numQPUs() - 1, others > 0, others = others - 1)
      semaDec(arrived);
    End
    For (Int others = numQPUs() - 1, others > 0, others = others - 1)
      semaInc(go);
    End
  Else
    semaInc(arrived);
    semaDec(go);
  End
}

auto compileProduct(Variant variant, const char* name) {
  return compile(
      [variant](Ptr<Int> from) {
        Int row = me() * kRows;
        Int column = 0;
        Int half = (me() & 1) * kRows;
        Int columns;
        Numbers params;
        const auto settle = [&] {
          columns = params.get(kN);
          Int rows = (params.get(kM) + (kRows - 1)) & -kRows;
          While (row >= rows)
            row = row - rows;
            column = column + kColumns;
          End
        };
        If (me() == 0)
          semaInc(kHalf);
          semaInc(kOtherHalf);
        End
        params.fetch(from);
        Int rounds = params.get(kStep) >> 8;
        settle();
        While (column < columns)
          Tile tile(variant, params, row, column);
          params.put(kFrom, address(from));
          params.put(kVpmColumn, half);
          params.put(kRoundsLeft, rounds);
          tile.compute();
          row = params.get(kRow);
          column = params.get(kColumn);
          from = pointer<Int>(params.get(kFrom));
          half = params.get(kVpmColumn);
          rounds = params.get(kRoundsLeft) - 1;
          params.fetch(from);
          tile.write(params, row, column, half);
          row = row + (params.get(kStep) & 255);
          settle();
          If (rounds >= 0)
            If ((rounds & 1) == 0)
              barrier(kArrived, kContinue);
            Else
              barrier(kArrivedOdd, kContinueOdd);
            End
          End
        End
        // QPU 0 waits for the other QPUs and resets the semaphores to 0.
        If (me() == 0)
          For (Int others = numQPUs() - 1, others > 0, others = others - 1)
            semaDec(kArrived);
          End
          semaDec(kHalf);
          semaDec(kOtherHalf);
        Else
          semaInc(kArrived);
        End
      },
      name);
}

// Returns true if copying `a` is worthwhile. Rows whose distance is a multiple of 1 KB evict each
// other from the caches. Matrices with contiguous columns are treated in the same way.
bool shouldPack(const Product& p) {
  const bool collides = p.aRow % 256 == 0 || p.aColumn != 1;
  return p.n >= (collides ? 128 : 256) && p.m >= kRows && p.k >= 16 * kDepth;
}

// Runs one variant of the kernel with its parameters.
template <typename K>
void launch(const K& kernel, const Product& p, int bRow, int bColumn, int beta, int qpus) {
  const Scratch params(16);
  int* const at = params.hostInts();
  at[kC] = bits(p.c.address());
  at[kCStride] = p.cStride;
  at[kA] = bits(p.a.address());
  at[kARow] = p.aRow;
  at[kAColumn] = p.aColumn;
  at[kB] = bits(p.b.address());
  at[kBRow] = bRow;
  at[kBColumn] = bColumn;
  at[kM] = p.m;
  at[kN] = p.n;
  at[kLastK] = p.k - 1;
  at[kAlpha] = bits(p.alpha);
  at[kBeta] = beta;
  const int workers = qpus == 0 ? kMostQpus : qpus;
  const std::int64_t all = (std::int64_t{p.m} + kRows - 1) / kRows *
                           ((std::int64_t{p.n} + kColumns - 1) / kColumns);
  const auto rounds = static_cast<int>(std::min<std::int64_t>(all / workers, kMostRounds));
  at[kStep] = kRows * workers | rounds << 8;
  at[kPacked] = 0;
  const std::int64_t gap = std::int64_t{4} * (p.cStride - kColumns);
  at[kGap] = gap >= 0 && gap <= kMostGap ? static_cast<int>(gap) : -1;
  if (!shouldPack(p)) {
    run(kernel, qpus, params.ints());
    return;
  }
  static const auto pack = compile(packTiles, "pack");
  const int tiles = (p.m + kRows - 1) / kRows;
  const int rowInTile = (p.k + kDepth - 1) / kDepth * kDepth;
  // During the last iteration, the kernel requests the values of `a` for one more iteration, so the
  // memory must have room for these values.
  const Scratch packed(static_cast<std::size_t>(tiles * kRows) *
                           static_cast<std::size_t>(rowInTile) +
                       std::size_t{kRows} * kDepth);
  run(pack, qpus == 0 ? kPackQpus : std::min(qpus, kPackQpus), tiles, p.m, p.k,
      kRows * rowInTile, packed.floats(), p.a, p.aRow, p.aColumn);
  at[kA] = bits(packed.floats().address());
  at[kARow] = rowInTile;
  at[kAColumn] = kRows;
  at[kPacked] = -1;
  run(kernel, qpus, params.ints());
}

void requireStrides(const char* what, const Matrix& matrix) {
  requireFactor("matmul", what, matrix.rowStride);
  requireFactor("matmul", what, matrix.columnStride);
}

// Computes the product p with the kernel in this file only.
void productByRequests(const Product& p, int qpus) {
  if (p.beta == 0) {
    static const auto kernel = compileProduct(Variant::Plain, "matmul");
    launch(kernel, p, p.bRow, p.bColumn, 0, qpus);
    return;
  }
  static const auto kernel = compileProduct(Variant::Accumulate, "matmul-accumulate");
  launch(kernel, p, p.bRow, p.bColumn, bits(p.beta), qpus);
}

Floats moved(const Floats& p, std::int64_t elements) {
  return Floats::fromAddress(p.address() + static_cast<std::uint32_t>(4 * elements));
}

// Returns the part of product p that starts at the given row and column of c.
Product partOf(const Product& p, int row, int column, int rows, int columns) {
  Product part = p;
  part.c = moved(p.c, std::int64_t{row} * p.cStride + column);
  part.a = moved(p.a, std::int64_t{row} * p.aRow);
  part.b = moved(p.b, std::int64_t{column} * p.bColumn);
  part.m = rows;
  part.n = columns;
  return part;
}

}  // namespace

void product(const Product& p, int qpus) {
  const Shared shared = shareable(p, qpus);
  if (shared.rows == 0) {
    productByRequests(p, qpus);
    return;
  }
  sharedProduct(partOf(p, 0, 0, shared.rows, shared.columns));
  if (shared.columns < p.n)
    productByRequests(partOf(p, 0, shared.columns, shared.rows, p.n - shared.columns), qpus);
  if (shared.rows < p.m)
    productByRequests(partOf(p, shared.rows, 0, p.m - shared.rows, p.n), qpus);
}

void productByTables(const Product& p, int qpus) {
  static const auto kernel = compileProduct(Variant::Tables, "conv2d");
  launch(kernel, p, bits(p.rowTable.address()), bits(p.columnTable.address()),
         bits(p.bias.address()), qpus);
}

void matmul(Matrix c, Matrix a, Matrix b, int m, int n, int k, float alpha, float beta,
            int qpus) {
  requireSize("matmul", "m", m);
  requireSize("matmul", "n", n);
  requireSize("matmul", "k", k);
  if (c.columnStride != 1) fail("matmul", "c's column stride must be 1");
  if (m > 1 && c.rowStride < n)
    fail("matmul", "c's row stride is " + std::to_string(c.rowStride) + ", but must be at least " +
                       std::to_string(n) + ", the number of columns");
  requireMatrix("matmul", "c", c, m, n);
  requireMatrix("matmul", "a", a, m, k);
  requireMatrix("matmul", "b", b, k, n);
  requireStrides("c's stride", c);
  requireStrides("a's stride", a);
  requireStrides("b's stride", b);
  requireFactor("matmul", "m", m);
  requireFactor("matmul", "n", n);
  requireFactor("matmul", "k", k);
  if (m == 0 || n == 0) return;
  Product p;
  p.c = c.data;
  p.cStride = c.rowStride;
  p.m = m;
  p.n = n;
  p.beta = beta;
  if (k == 0) {
    // If k is 0, the sum has no terms, so the kernel multiplies an arbitrary word by 0.
    const Scratch word(1);
    p.a = p.b = word.floats();
    p.k = 1;
    p.alpha = 0;
    product(p, qpus);
    return;
  }
  p.a = a.data;
  p.aRow = a.rowStride;
  p.aColumn = a.columnStride;
  p.b = b.data;
  p.bRow = b.rowStride;
  p.bColumn = b.columnStride;
  p.k = k;
  p.alpha = alpha;
  product(p, qpus);
}

}  // namespace qpu::kernels
