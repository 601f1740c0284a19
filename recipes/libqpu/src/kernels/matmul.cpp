// Matrix times matrix. A QPU computes tiles of 8 rows by 64 columns, whose 32
// vectors stay in registers while k runs. k goes in panels of 16: one vector per
// row of a holds 16 values of k, of which each in turn is broadcast; rows of b
// come vector by vector and serve all 8 rows. The QPUs take tiles of one column
// of tiles at a time, so that they share b's lines in the caches.
//
// Every sum runs over k in order, so results do not depend on the QPU count.
#include "kernels/matmul.hpp"

#include "kernels/stream.hpp"

namespace qpu::kernels {
namespace {

constexpr int kRows = 8;
constexpr int kAcross = 4;  // vectors of a tile's row
constexpr int kColumns = 16 * kAcross;
constexpr int kPanel = 16;
constexpr int kTurn = 4;  // values of k per turn of the inner loop
static_assert(kInFlight % kAcross == 0, "requests run ahead by whole rows of b");
static_assert(kAcross == kShort, "a tile's row is one burst of any QPU");

enum class Variant { Plain, Accumulate, Tables };

// What a kernel is told, as elements of a vector in memory. With tables, kBRow and
// kBColumn are their addresses and kBeta is the bias's. kLastK is k - 1; kStep,
// how many rows of c all QPUs together take at a time.
enum Told {
  kC, kCStride, kA, kARow, kB, kBColumn, kM, kN,
  kLastK, kAColumn, kBRow, kAlpha, kBeta, kStep
};
// What a QPU remembers while k runs, as elements of one vector, for as variables
// each would hold a register: elements 0..7 are the addresses of the rows of a;
// kLastK, kAColumn and kBRow are where they were.
enum Kept { kK = 11, kRow, kColumn, kFrom, kVpmRow };

template <typename T>
PtrExpr<T> pointer(const IntExpr& bytes) {
  return PtrExpr<T>(detail::FromNode(bytes.node()));
}
IntExpr address(const PtrExpr<Int>& p) { return IntExpr(detail::FromNode(p.node())); }

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }

// A vector whose elements are numbers of their own.
class Numbers {
 public:
  // Twice, so that the number of requests is even.
  void fetch(const PtrExpr<Int>& from) {
    gather(from + index());
    gather(from + index());
    Int unused;
    receive(all_);
    receive(unused);
  }
  IntExpr get(int place) const { return broadcast(all_, place); }
  FloatExpr getFloat(int place) const { return asFloat(get(place)); }
  void put(int place, const IntExpr& x) {
    Where (index() == place)
      all_ = x;
    End
  }
  void putFirst(int count, const IntExpr& x) {
    Where (index() < count)
      all_ = x;
    End
  }

 private:
  Int all_;
};

class Tile {
 public:
  // `told` becomes what is kept while k runs.
  Tile(Variant variant, Numbers& told, const Int& row, const Int& column)
      : tables_(variant == Variant::Tables), variant_(variant),
        head_(tables_ ? kRows + 2 : kRows), kept_(told) {
    // Rows and columns that are not there are the last ones again.
    Int r = min(row + index(), told.get(kM) - 1);
    Int rows = told.get(kA) + ((r * told.get(kARow)) << 2);
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
    kept_.putFirst(kRows, rows);
    kept_.put(kK, 0);
    kept_.put(kRow, row);
    kept_.put(kColumn, column);
  }

  void compute() {
    for (auto& r : sum_)
      for (Float& s : r) s = 0;
    ask();
    for (int p = 0; p < kInFlight; ++p) requestHead(p);
    While (kept_.get(kK) <= kept_.get(kLastK))
      head();
      While ((kept_.get(kK) & (kPanel - 1)) != kPanel - kTurn)
        turn(false);
        for (Float& a : a_) a = rotate(a, 16 - kTurn);
        offset_ = rotate(offset_, 16 - kTurn);
      End
      turn(true);
    End
    // What was asked of the panel after the last one.
    Float unused;
    Int unusedOffset;
    for (int p = 0; p < kInFlight; ++p) {
      if (tables_ && p < 2)
        receive(unusedOffset);
      else
        receive(unused);
    }
  }

  void write(const Numbers& told, const Int& row, const Int& column, const Int& vpmRow) {
    Float bias;
    if (tables_) {
      Ptr<Float> from = pointer<Float>(told.get(kBeta)) + min(row + index(), told.get(kM) - 1);
      gather(from);
      gather(from);
      receive(bias);
      Float unused;
      receive(unused);
    }
    Int width = told.get(kN) - column;
    for (int r = 0; r < kRows; ++r) {
      If (row + r < told.get(kM))
        Ptr<Float> start = pointer<Float>(told.get(kC)) + (row + r) * told.get(kCStride);
        finish(r, told, start, column, width, bias);
        start = start + column;
        If (width >= kColumns)
          burst(sum_[at(r)], start, vpmRow);
        Else
          finishBursts();
          for (int s = 0; s < kAcross; ++s) {
            If (width > 16 * s)
              store(sum_[at(r)][at(s)], start + 16 * s, min(width - 16 * s, 16));
            End
          }
        End
      End
    }
  }

 private:
  // Numbers of the columns of vector s.
  static IntExpr columnsOf(int s, const Numbers& told, const Int& column) {
    return min(column + (index() + 16 * s), told.get(kN) - 1);
  }

  // Where the panel from k on is; beyond the last value of k that is read again.
  void ask() {
    wanted_ = min(kept_.get(kK) + index(), kept_.get(kLastK));
    from_ = tables_ ? wanted_ << 2 : (wanted_ * kept_.get(kAColumn)) << 2;
    if (!tables_) offset_ = (wanted_ * kept_.get(kBRow)) << 2;
  }

  // Each panel asks for the same stream: its head, then the rows of b.
  void requestHead(int position) {
    if (!tables_) {
      gather(pointer<Float>(from_ + kept_.get(position)));
    } else if (position < 2) {
      // Twice, so that the number of requests is even.
      gather(pointer<Int>(kept_.get(kBRow) + (wanted_ << 2)));
    } else {
      gather(pointer<Float>(from_ + kept_.get(position - 2)));
    }
  }
  // Vector `position` of b counted from the value of k in element 0 of offset_.
  void requestRow(int position) {
    gather(pointer<Float>(broadcast(offset_, position / kAcross) + columns_[at(position % kAcross)]));
  }

  void head() {
    Int there = ~((kept_.get(kLastK) - (kept_.get(kK) + index())) >> 31);
    for (int c = 0; c < head_; ++c) {
      if (tables_ && c == 0) {
        receive(offset_);
        offset_ = offset_ << 2;
      } else if (tables_ && c == 1) {
        Int unused;
        receive(unused);
      } else {
        Float v;
        receive(v);
        // Values of k that are not there count as 0.
        a_[at(tables_ ? c - 2 : c)] = asFloat(asInt(v) & there);
      }
      if (c + kInFlight < head_)
        requestHead(c + kInFlight);
      else
        requestRow(c + kInFlight - head_);
    }
  }

  // The products of kTurn values of k; the last turn of a panel asks for the next.
  void turn(bool last) {
    kept_.put(kK, kept_.get(kK) + kTurn);
    for (int k = 0; k < kTurn; ++k) {
      std::array<Float, kAcross> b;
      for (int s = 0; s < kAcross; ++s) {
        receive(b[at(s)]);
        const int next = k * kAcross + s + kInFlight - (last ? kTurn * kAcross : 0);
        if (last && next == 0) ask();
        if (last && next >= 0)
          requestHead(next);
        else
          requestRow(k * kAcross + s + kInFlight);
      }
      for (int r = 0; r < kRows; ++r) {
        Float a = broadcast(a_[at(r)], k);
        for (int s = 0; s < kAcross; ++s) {
          Float& sum = sum_[at(r)][at(s)];
          sum = sum + a * b[at(s)];
        }
      }
    }
  }

  // Row r's sums become its results.
  void finish(int r, const Numbers& told, const PtrExpr<Float>& start, const Int& column,
              const Int& width, const Float& bias) {
    std::array<Float, kAcross>& sums = sum_[at(r)];
    if (tables_) {
      for (Float& s : sums) s = s + broadcast(bias, r);
      return;
    }
    for (Float& s : sums) s = s * told.getFloat(kAlpha);
    if (variant_ == Variant::Plain) return;
    // Not as in columnsOf(), whose terms would stay in registers from there on.
    for (int s = 0; s < kAcross; ++s)
      gather(start + (column + (min(index(), width - (16 * s + 1)) + 16 * s)));
    for (Float& s : sums) {
      Float c;
      receive(c);
      s = s + c * told.getFloat(kBeta);
    }
  }

  const bool tables_;
  const Variant variant_;
  const int head_;  // requests before the rows of b
  std::array<std::array<Float, kAcross>, kRows> sum_;
  std::array<Float, kRows> a_;
  std::array<Int, kAcross> columns_;  // address of the columns in row 0 of b
  Numbers& kept_;
  Int offset_;  // bytes to the rows of b, one per element
  Int wanted_;  // values of k of the panel that is asked for
  Int from_;    // bytes to them in a row of a
};

auto compileProduct(Variant variant, const char* name) {
  return compile(
      [variant](Ptr<Int> from) {
        Int row = me() * kRows;
        Int column = 0;
        Int vpmRow = firstVpmRow<kShort>();
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
        told.fetch(from);
        settle();
        While (column < columns)
          Tile tile(variant, told, row, column);
          told.put(kFrom, address(from));
          told.put(kVpmRow, vpmRow);
          tile.compute();
          row = told.get(kRow);
          column = told.get(kColumn);
          vpmRow = told.get(kVpmRow);
          from = pointer<Int>(told.get(kFrom));
          told.fetch(from);
          tile.write(told, row, column, vpmRow);
          row = row + told.get(kStep);
          settle();
        End
        finishBursts();
      },
      name);
}

int bits(float x) {
  int b = 0;
  std::memcpy(&b, &x, sizeof b);
  return b;
}
int bits(std::uint32_t x) { return static_cast<int>(x); }

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
  at[kStep] = kRows * (qpus == 0 ? kMostQpus : qpus);
  run(kernel, qpus, told.ints());
}

void requireStrides(const char* what, const Matrix& matrix) {
  requireFactor("matmul", what, matrix.rowStride);
  requireFactor("matmul", what, matrix.columnStride);
}

}  // namespace

void product(const Product& p, int qpus) {
  if (p.beta == 0) {
    static const auto kernel = compileProduct(Variant::Plain, "matmul");
    launch(kernel, p, p.bRow, p.bColumn, 0, qpus);
    return;
  }
  static const auto kernel = compileProduct(Variant::Accumulate, "matmul-accumulate");
  launch(kernel, p, p.bRow, p.bColumn, bits(p.beta), qpus);
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
