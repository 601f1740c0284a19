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
constexpr int kStep = 4;  // values of k per turn of the inner loop
static_assert(kInFlight % kAcross == 0, "requests run ahead by whole rows of b");
static_assert(kAcross == kVectors, "a tile's row is one burst");

enum class Variant { Plain, Accumulate, Tables };

// The kernel's scalars wait in the elements of one vector: as variables each
// would hold a register through the inner loop.
class Bag {
 public:
  void put(int place, const IntExpr& x) {
    Where (index() == place)
      all_ = x;
    End
  }
  IntExpr get(int place) const { return broadcast(all_, place); }
  FloatExpr getFloat(int place) const { return asFloat(get(place)); }

 private:
  Int all_ = 0;
};

// With tables, kBRow and kBColumn are their addresses and kBeta is the bias's.
enum Place { kC, kCStride, kA, kARow, kAColumn, kB, kBRow, kBColumn, kM, kN, kK, kAlpha, kBeta };

template <typename T>
PtrExpr<T> pointer(const IntExpr& bytes) {
  return PtrExpr<T>(detail::FromNode(bytes.node()));
}
template <typename T>
IntExpr bytesOf(const PtrExpr<T>& p) {
  return IntExpr(detail::FromNode(p.node()));
}

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }

class Tile {
 public:
  Tile(const Bag& bag, Variant variant, const Int& row, const Int& column)
      : bag_(bag), tables_(variant == Variant::Tables), variant_(variant), row_(row),
        column_(column), head_(tables_ ? kRows + 2 : kRows) {}

  void compute() {
    for (auto& r : sum_)
      for (Float& s : r) s = 0;
    // Rows and columns that are not there are the last ones again.
    Int r = min(row_ + index(), bag_.get(kM) - 1);
    rows_ = (r * bag_.get(kARow)) << 2;
    for (int s = 0; s < kAcross; ++s) {
      Int j = column(s);
      if (tables_)
        gather(pointer<Int>(bag_.get(kBColumn) + (j << 2)));
      else
        columns_[at(s)] = bag_.get(kB) + ((j * bag_.get(kBColumn)) << 2);
    }
    if (tables_)
      for (Int& c : columns_) {
        receive(c);
        c = bag_.get(kB) + (c << 2);
      }

    k_ = 0;
    ask();
    for (int p = 0; p < kInFlight; ++p) requestHead(p);
    While (k_ < bag_.get(kK))
      head();
      While ((k_ & (kPanel - 1)) != kPanel - kStep)
        step(false);
        for (Float& a : a_) a = rotate(a, 16 - kStep);
        offset_ = rotate(offset_, 16 - kStep);
        k_ = k_ + kStep;
      End
      k_ = k_ + kStep;
      step(true);
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

  void write() {
    Float bias;
    if (tables_) {
      Ptr<Float> from = pointer<Float>(bag_.get(kBeta)) + min(row_ + index(), bag_.get(kM) - 1);
      gather(from);
      gather(from);
      receive(bias);
      Float unused;
      receive(unused);
    }
    Int width = bag_.get(kN) - column_;
    for (int r = 0; r < kRows; ++r) {
      Int row = row_ + r;
      If (row < bag_.get(kM))
        Ptr<Float> start = pointer<Float>(bag_.get(kC)) + row * bag_.get(kCStride);
        finish(r, start, bias);
        start = start + column_;
        If (width >= kColumns)
          burst(sum_[at(r)], start);
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
  Int column(int s) const { return min(column_ + (index() + 16 * s), bag_.get(kN) - 1); }

  // Where the head of the panel from k_ on is; beyond the last it is read again.
  void ask() {
    wanted_ = min(k_ + index(), bag_.get(kK) - 1);
    from_ = bag_.get(kA) + ((wanted_ * bag_.get(kAColumn)) << 2);
  }

  // Each panel asks for the same stream: its head, then the rows of b.
  void requestHead(int position) {
    if (!tables_) {
      gather(pointer<Float>(from_ + broadcast(rows_, position)));
    } else if (position < 2) {
      // Twice, so that the number of requests is even.
      gather(pointer<Int>(bag_.get(kBRow) + (wanted_ << 2)));
    } else {
      gather(pointer<Float>(from_ + broadcast(rows_, position - 2)));
    }
  }
  // Vector `position` of b counted from the value of k in element 0 of offset_.
  void requestRow(int position) {
    gather(pointer<Float>(broadcast(offset_, position / kAcross) + columns_[at(position % kAcross)]));
  }

  void head() {
    Int beyond = (k_ + index() - bag_.get(kK)) >> 31;
    if (!tables_) offset_ = (wanted_ * bag_.get(kBRow)) << 2;
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
        a_[at(tables_ ? c - 2 : c)] = asFloat(asInt(v) & beyond);
      }
      if (c + kInFlight < head_)
        requestHead(c + kInFlight);
      else
        requestRow(c + kInFlight - head_);
    }
  }

  void step(bool last) {
    if (last) ask();
    for (int k = 0; k < kStep; ++k) {
      std::array<Float, kAcross> b;
      for (int s = 0; s < kAcross; ++s) {
        receive(b[at(s)]);
        const int next = k * kAcross + s + kInFlight;
        if (last && next >= kStep * kAcross)
          requestHead(next - kStep * kAcross);
        else
          requestRow(next);
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
  void finish(int r, const PtrExpr<Float>& start, const Float& bias) {
    std::array<Float, kAcross>& sums = sum_[at(r)];
    if (tables_) {
      for (Float& s : sums) s = s + broadcast(bias, r);
      return;
    }
    for (Float& s : sums) s = s * bag_.getFloat(kAlpha);
    if (variant_ == Variant::Plain) return;
    for (int s = 0; s < kAcross; ++s) gather(start + column(s));
    for (Float& s : sums) {
      Float c;
      receive(c);
      s = s + c * bag_.getFloat(kBeta);
    }
  }

  const Bag& bag_;
  const bool tables_;
  const Variant variant_;
  const Int& row_;
  const Int& column_;
  const int head_;  // requests before the rows of b
  std::array<std::array<Float, kAcross>, kRows> sum_;
  std::array<Float, kRows> a_;
  std::array<Int, kAcross> columns_;  // address of the columns in row 0 of b
  Int rows_;     // bytes to the rows of a, one per element
  Int offset_;   // bytes to the rows of b, one per element
  Int k_;
  Int wanted_;   // values of k of the next panel
  Int from_;     // address of the panel's columns in row 0 of a
};

void tiles(const Bag& bag, Variant variant) {
  Int row = me() * kRows;
  Int column = 0;
  const auto settle = [&] {
    Int rows = (bag.get(kM) + (kRows - 1)) & -kRows;
    While (row >= rows)
      row = row - rows;
      column = column + kColumns;
    End
  };
  settle();
  While (column < bag.get(kN))
    Tile tile(bag, variant, row, column);
    tile.compute();
    tile.write();
    row = row + numQPUs() * kRows;
    settle();
  End
  finishBursts();
}

auto compileProduct(Variant variant, const char* name) {
  return compile(
      [variant](Ptr<Float> c, Int cStride, Ptr<Float> a, Int aRow, Int aColumn, Ptr<Float> b,
                Int bRow, Int bColumn, Int m, Int n, Int k, Float alpha, Float beta) {
        Bag bag;
        bag.put(kC, bytesOf(c));
        bag.put(kCStride, cStride);
        bag.put(kA, bytesOf(a));
        bag.put(kARow, aRow);
        bag.put(kAColumn, aColumn);
        bag.put(kB, bytesOf(b));
        bag.put(kBRow, bRow);
        bag.put(kBColumn, bColumn);
        bag.put(kM, m);
        bag.put(kN, n);
        bag.put(kK, k);
        bag.put(kAlpha, asInt(alpha));
        bag.put(kBeta, asInt(beta));
        tiles(bag, variant);
      },
      name);
}

auto compileProductByTables() {
  return compile(
      [](Ptr<Float> c, Int cStride, Ptr<Float> a, Int aRow, Ptr<Float> b, Ptr<Int> rows,
         Ptr<Int> columns, Int m, Int n, Int k, Ptr<Float> bias) {
        Bag bag;
        bag.put(kC, bytesOf(c));
        bag.put(kCStride, cStride);
        bag.put(kA, bytesOf(a));
        bag.put(kARow, aRow);
        bag.put(kAColumn, 1);
        bag.put(kB, bytesOf(b));
        bag.put(kBRow, bytesOf(rows));
        bag.put(kBColumn, bytesOf(columns));
        bag.put(kM, m);
        bag.put(kN, n);
        bag.put(kK, k);
        bag.put(kBeta, bytesOf(bias));
        tiles(bag, Variant::Tables);
      },
      "conv2d");
}

void requireStrides(const char* what, const Matrix& matrix) {
  requireFactor("matmul", what, matrix.rowStride);
  requireFactor("matmul", what, matrix.columnStride);
}

}  // namespace

void product(const Product& p, int qpus) {
  static const auto plain = compileProduct(Variant::Plain, "matmul");
  static const auto accumulate = compileProduct(Variant::Accumulate, "matmul-accumulate");
  run(p.beta == 0 ? plain : accumulate, qpus, p.c, p.cStride, p.a, p.aRow, p.aColumn, p.b, p.bRow,
      p.bColumn, p.m, p.n, p.k, p.alpha, p.beta);
}

void productByTables(const Product& p, int qpus) {
  static const auto kernel = compileProductByTables();
  run(kernel, qpus, p.c, p.cStride, p.a, p.aRow, p.b, p.rowTable, p.columnTable, p.m, p.n, p.k,
      p.bias);
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
    // Nothing to sum: 0 times an element that is there.
    p.a = p.b = c.data;
    p.k = 1;
    p.alpha = 0;
  } else {
    p.a = a.data;
    p.aRow = a.rowStride;
    p.aColumn = a.columnStride;
    p.b = b.data;
    p.bRow = b.rowStride;
    p.bColumn = b.columnStride;
    p.k = k;
    p.alpha = alpha;
  }
  product(p, qpus);
}

}  // namespace qpu::kernels
