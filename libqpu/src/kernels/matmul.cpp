// Matrix times matrix. A QPU computes tiles of 8 rows by 64 columns, whose 32
// vectors stay in registers while k runs, four values in a turn: two vectors with
// 4 rows by 4 values of a, whose elements are broadcast one after the other, and 16
// vectors of b, which serve all 8 rows. The QPUs take tiles of one column of tiles
// at a time, so that they share b's lines in the caches.
//
// Where a is read often, a copy of it is made first in which those two vectors lie
// side by side.
//
// Finished tiles go to memory as wholes, through half of the VPM each: starting a DMA
// costs as much as storing many rows. Two semaphores hand the halves round.
//
// Every sum runs over k in order, so results do not depend on the QPU count.
//
// With all QPUs, most of a large product goes to the kernel in matmul_shared.cpp.
#include "kernels/matmul.hpp"

#include <algorithm>

#include "kernels/matmul_shared.hpp"
#include "kernels/matmul_tile.hpp"

namespace qpu::kernels {
namespace {

constexpr int kTurn = 4;  // values of k
constexpr int kEarly = kAcross * (kTurn - 1);  // vectors of b used before the next a
static_assert(kRows == 8 && kTurn == 4, "two vectors of a hold a turn");

// What a QPU remembers while k runs, in one vector too: as variables the numbers
// would hold a register each.
enum Kept { kRow, kColumn, kFrom, kVpmColumn, kRoundsLeft };

// Whose turn it is at the halves of the VPM; that a QPU waits for the others, that it
// may go on, in odd rounds and in even ones.
enum Semaphore { kHalf, kOtherHalf, kHere, kGo, kHereToo, kGoToo };
constexpr int kMostRounds = (1 << 22) - 1;

class Tile : public Sums {
 public:
  // `told` becomes what is kept while k runs.
  Tile(Variant variant, Numbers& told, const Int& row, const Int& column)
      : Sums(variant) {
    // Rows and columns that are not there are the last ones again.
    Int packed = told.get(kPacked);
    Int laneK = index() & 3 & ~packed;
    for (int half = 0; half < 2; ++half) {
      Int r = min(row + (((index() >> 2) + 4 * half) & ~packed), told.get(kM) - 1);
      rows_[at(half)] = told.get(kA) + ((r * told.get(kARow)) << 2) +
                        (((index() << 2) + 64 * half) & packed);
    }
    beyond_ = laneK - (told.get(kLastK) + 1);
    lastA_ = (told.get(kLastK) * told.get(kAColumn)) << 2;
    from_ = min((laneK * told.get(kAColumn)) << 2, lastA_);
    stepA_ = told.get(kAColumn) << 4;
    if (tables_) {
      lastB_ = told.get(kBRow) + (told.get(kLastK) << 2);
      next_ = min(told.get(kBRow) + (index() << 2), lastB_);
    } else {
      lastB_ = (told.get(kLastK) * told.get(kBRow)) << 2;
      offset_ = min((index() * told.get(kBRow)) << 2, lastB_);
      stepB_ = told.get(kBRow) << 4;
    }
    for (int s = 0; s < kAcross; ++s) {
      Int j = columnsOf(s, told, column);
      if (tables_)
        gather(pointer<Int>(told.get(kBColumn) + (j << 2)));
      else
        columns_[at(s)] = told.get(kB) + ((j * told.get(kBColumn)) << 2);
    }
    if (tables_)
      for (Int& c : columns_) {
        receive(c);
        c = told.get(kB) + (c << 2);
      }
    told.put(kRow, row);
    told.put(kColumn, column);
  }

  void compute() {
    clear();
    // Before the first turn what a turn finds: its values of a, and the rows of b
    // asked for as far ahead as ever.
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
      turn();
    End
    Float unused;
    for (int p = 0; p < kInFlight; ++p) receive(unused);
  }

  // Through eight columns of the VPM from `half` on.
  void write(const Numbers& told, const Int& row, const Int& column, const Int& half) {
    Float bias;
    if (tables_) {
      Ptr<Float> from = pointer<Float>(told.get(kBeta)) + min(row + index(), told.get(kM) - 1);
      gather(from);
      gather(from);
      receive(bias);
      Float unused;
      receive(unused);
    }
    Int rows = told.get(kM) - row;
    Int width = told.get(kN) - column;
    Ptr<Float> start = pointer<Float>(told.get(kC)) + row * told.get(kCStride);
    If (width >= kColumns)
      If (half == 0)
        semaDec(kHalf);
      Else
        semaDec(kOtherHalf);
      End
      storeWhole(told, start, column, rows, half, bias);
      If (half == 0)
        semaInc(kHalf);
      Else
        semaInc(kOtherHalf);
      End
    Else
      semaDec(kHalf);
      semaDec(kOtherHalf);
      storeNarrow(told, start, column, rows, width, bias);
      semaInc(kHalf);
      semaInc(kOtherHalf);
    End
  }

 private:
  // Numbers of the columns of vector s.
  static IntExpr columnsOf(int s, const Numbers& told, const Int& column) {
    return min(column + (index() + 16 * s), told.get(kN) - 1);
  }

  // Of two requests each: of the table the same, so that their number is even.
  void requestTable(int which) {
    gather(pointer<Int>(next_));
    if (which == 1) next_ = min(next_ + 4 * kTurn, lastB_);
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
  // Values of k that are not there count as 0.
  void take(const std::array<Float, 2>& a) {
    Int there = beyond_ >> 31;
    for (std::size_t half = 0; half < 2; ++half) a_[half] = asFloat(asInt(a[half]) & there);
  }
  // Vector `position` of the rows of b of the turn that is asked for.
  void requestRow(int position) {
    gather(pointer<Float>(broadcast(offset_, position / kAcross) + columns_[at(position % kAcross)]));
  }

  // A turn uses the rows of b in order, and before the last the next turn's a, with
  // tables behind where the rows of the turn after it are. Each use is followed by
  // the request for what is used kInFlight uses later.
  void request(int use) {
    const int length = kAcross * kTurn + (tables_ ? 4 : 2);
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

  void turn() {
    int use = 0;
    std::array<Float, 2> nextA;
    beyond_ = beyond_ + kTurn;
    for (int k = 0; k < kTurn; ++k) {
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

  std::array<Float, 2> a_;            // the turn's values of a, four rows each
  std::array<Int, kAcross> columns_;  // addresses of the columns in row 0 of b
  std::array<Int, 2> rows_;           // addresses in a of its first turn
  Int beyond_;                        // k - how many there are, of the next a
  Int from_, stepA_, lastA_;          // bytes from rows_ to the next a
  Int offset_, stepB_, lastB_;        // bytes to a turn's rows of b, one per element
  Int offsetAfter_, next_;            // with tables: of the turn after; address in it
};

// Vectors of a block of the copy, and QPUs that make it: each has four columns of the
// VPM, which hold four vectors and go to memory as one row.
constexpr int kPackBlock = 16, kPackColumns = 4;
constexpr int kPackQpus = 16 / kPackColumns;

// Copies a for the product: tiles of 8 rows, in them turns of 4 values of k, in
// those the rows. Values of k beyond the last are 0. `size` is a multiple of 32.
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

// All QPUs wait for each other: from here on they read the same rows of b at the same
// time, which cross the bus once. Two meetings in turn use different semaphores, lest a
// quick QPU take a slow one's leave to go on.
void meet(int here, int go) {
  If (me() == 0)
    For (Int others = numQPUs() - 1, others > 0, others = others - 1)
      semaDec(here);
    End
    For (Int others = numQPUs() - 1, others > 0, others = others - 1)
      semaInc(go);
    End
  Else
    semaInc(here);
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
        Numbers told;
        const auto settle = [&] {
          columns = told.get(kN);
          Int rows = (told.get(kM) + (kRows - 1)) & -kRows;
          While (row >= rows)
            row = row - rows;
            column = column + kColumns;
          End
        };
        If (me() == 0)
          semaInc(kHalf);
          semaInc(kOtherHalf);
        End
        told.fetch(from);
        Int rounds = told.get(kStep) >> 8;
        settle();
        While (column < columns)
          Tile tile(variant, told, row, column);
          told.put(kFrom, address(from));
          told.put(kVpmColumn, half);
          told.put(kRoundsLeft, rounds);
          tile.compute();
          row = told.get(kRow);
          column = told.get(kColumn);
          from = pointer<Int>(told.get(kFrom));
          half = told.get(kVpmColumn);
          rounds = told.get(kRoundsLeft) - 1;
          told.fetch(from);
          tile.write(told, row, column, half);
          row = row + (told.get(kStep) & 255);
          settle();
          If (rounds >= 0)
            If ((rounds & 1) == 0)
              meet(kHere, kGo);
            Else
              meet(kHereToo, kGoToo);
            End
          End
        End
        // QPU 0 waits for the others and takes the tokens away.
        If (me() == 0)
          For (Int others = numQPUs() - 1, others > 0, others = others - 1)
            semaDec(kHere);
          End
          semaDec(kHalf);
          semaDec(kOtherHalf);
        Else
          semaInc(kHere);
        End
      },
      name);
}

// Whether a copy of a pays. Its rows that are a multiple of 1 KB apart, and its
// columns where they lie side by side, push each other out of the caches.
bool shouldPack(const Product& p) {
  const bool collides = p.aRow % 256 == 0 || p.aColumn != 1;
  return p.n >= (collides ? 128 : 256) && p.m >= kRows && p.k >= 16 * kTurn;
}

// Runs a variant with what it is to be told.
template <typename K>
void launch(const K& kernel, const Product& p, int bRow, int bColumn, int beta, int qpus) {
  const Scratch told(16);
  int* const at = told.hostInts();
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
    run(kernel, qpus, told.ints());
    return;
  }
  static const auto pack = compile(packTiles, "pack");
  const int tiles = (p.m + kRows - 1) / kRows;
  const int rowInTile = (p.k + kTurn - 1) / kTurn * kTurn;
  // The turn after the last one is asked for, too.
  const Scratch packed(static_cast<std::size_t>(tiles * kRows) *
                           static_cast<std::size_t>(rowInTile) +
                       std::size_t{kRows} * kTurn);
  run(pack, qpus == 0 ? kPackQpus : std::min(qpus, kPackQpus), tiles, p.m, p.k,
      kRows * rowInTile, packed.floats(), p.a, p.aRow, p.aColumn);
  at[kA] = bits(packed.floats().address());
  at[kARow] = rowInTile;
  at[kAColumn] = kRows;
  at[kPacked] = -1;
  run(kernel, qpus, told.ints());
}

void requireStrides(const char* what, const Matrix& matrix) {
  requireFactor("matmul", what, matrix.rowStride);
  requireFactor("matmul", what, matrix.columnStride);
}

// All of p by the kernel above.
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

// p from a row and a column of c on.
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
  if (c.columnStride != 1) refuse("matmul", "c's column stride must be 1");
  if (m > 1 && c.rowStride < n)
    refuse("matmul", "c's rows are " + std::to_string(c.rowStride) + " apart and overlap");
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
    // Nothing to sum: 0 times a word of no matrix.
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
