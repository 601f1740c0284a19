// Large products whose b lies in rows. All QPUs but the first compute tiles of 8 rows
// by 64 columns below each other; the first loads b for them, by DMA into the VPM, a
// block of 8 rows of b after the other, so that it crosses the bus once and takes
// neither requests nor addresses of those who compute. Each half of the VPM holds a
// block: one is read while the other is filled.
//
// a comes by request, a row of 16 values of k at a time, which is a line of the caches
// that nobody asks for again: no copy of a is needed, however its rows lie. Eight such
// rows are transposed in registers, so that two vectors have the values of all rows for
// four values of k: both stay in accumulators for a turn, where a broadcast takes one
// operation. Behind the last values of k those of the next tile are asked for, so that
// nobody waits for them when the bus is busy with stores.
//
// Between two tiles the VPM takes finished ones to memory, as in matmul.cpp.
//
// Every sum runs over k in order, as there: results are the same bits.
#include "kernels/matmul_shared.hpp"

#include <algorithm>

#include "kernels/matmul_tile.hpp"

namespace qpu::kernels {
namespace {

constexpr int kBlock = 8;    // rows of b
constexpr int kHalfRows = kBlock * kAcross;  // of the VPM
constexpr int kPeriod = 16;  // values of k in a vector of a
constexpr int kTurn = 4;     // values of k, in two vectors of a
static_assert(2 * kHalfRows == 64 && kPeriod == 2 * kBlock, "a vector of a lasts two blocks");
static_assert(kRows == 2 * kPeriod / kTurn, "a turn uses up two vectors of a");

// A block is there, in one half and in the other; one QPU has taken a block, so has read
// the one before, or has stored its tile; the halves are free for tiles.
enum Semaphore { kReady, kReadyToo, kRead, kHalf, kOtherHalf };

// In which order the rows of a tile take each value of k of a turn, and which of them from
// left to right (bits). An instruction reads one register of each file, so the order decides
// how well the pipes are filled: of some thousand tried by chance the quickest.
constexpr std::array<std::array<int, kRows>, kTurn> kOrder{{
    {6, 5, 2, 4, 1, 0, 7, 3},
    {3, 5, 4, 0, 2, 6, 7, 1},
    {1, 4, 3, 0, 7, 6, 5, 2},
    {5, 1, 0, 6, 7, 3, 4, 2}}};
constexpr std::array<unsigned, kTurn> kFromLeft{0x23, 0xf5, 0xf1, 0xfa};

// What a QPU remembers while k runs, in places that this kernel is told nothing in.
enum Kept { kGroup = kBColumn, kColumn = kAColumn, kAhead = kPacked, kLast = kStep };

void repeat(int times, int semaphore, void (*f)(int, Location)) {
  for (int i = 0; i < times; ++i) f(semaphore, QPU_HERE);
}
void take(int times, int semaphore) { repeat(times, semaphore, semaDec); }
void give(int times, int semaphore) { repeat(times, semaphore, semaInc); }

// Up to a block of rows of b.
void load(const Ptr<Float>& from, const Int& left, const Int& vpm, const Int& rowBytes) {
  If (all(left >= kBlock && rowBytes <= kMostGap))
    dmaSetReadPitch(rowBytes);
    for (int s = 0; s < kAcross; ++s) {
      dmaSetupRead(HORIZ, kBlock, vpm + 16 * s, 16, kAcross);
      dmaStartRead(from + 16 * s);
      dmaWaitRead();
    }
  Else
    dmaSetReadPitch(64);
    Ptr<Float> row = from;
    Int to = vpm;
    For (Int rows = min(left, kBlock), rows > 0, rows = rows - 1)
      dmaSetupRead(HORIZ, kAcross, to, 16, 1);
      dmaStartRead(row);
      to = to + kColumns;
      row = row + (rowBytes >> 2);
      dmaWaitRead();
    End
  End
}

// What the first QPU does. It announces no block before all have taken the one before: so a
// quick QPU finds no leave that was meant for a slow one.
void serve(const Numbers& told, int workers) {
  Int rowBytes = told.get(kBRow) << 2;
  For (Int column = 0, column < told.get(kN), column = column + kColumns)
    For (Int group = 0, group < told.get(kM), group = group + workers * kRows)
      Ptr<Float> from = pointer<Float>(told.get(kB)) + column;
      Int half = 0;  // of the VPM: where it begins
      Int left = told.get(kLastK) + 1;
      // Those who compute take blocks by twos, and wait for one more than they take.
      For (Int blocks = (told.get(kLastK) >> 4) * 2 + 3, blocks > 0, blocks = blocks - 1)
        If (left > 0)
          load(from, left, half, rowBytes);
        End
        If (half == 0)
          give(workers, kReady);
        Else
          give(workers, kReadyToo);
        End
        half = half ^ (kHalfRows << 4);
        left = left - kBlock;
        from = from + told.get(kBRow) * kBlock;
        take(workers, kRead);
      End
      semaInc(kHalf);
      semaInc(kOtherHalf);
      take(workers, kRead);
      semaDec(kHalf);
      semaDec(kOtherHalf);
    End
  End
}

class SharedTile : public Sums {
 public:
  // Asks for what the first block finds: its values of a, and half of the next.
  SharedTile(Variant variant, Numbers& told, int workers) : Sums(variant), step_(workers * kRows) {
    told.put(kAhead, 0);
    told.put(kLast, told.get(kLastK) << 2);
    to(0, told);
    for (int r = 0; r < kRows; r += 2) requestTwo();
    advance(told, from_ + 4 * kPeriod);
    for (Float& a : a_) receive(a);
    for (int r = 0; r < kRows / 2; r += 2) requestTwo();
  }
  // What is asked for beyond that.
  static void receiveRest() {
    Float unused;
    for (int r = 0; r < kRows / 2; ++r) receive(unused);
  }

  void compute(Numbers& told) {
    clear();
    // Done by now; else the compiler has each semaphore of the loop wait for it.
    dmaWaitWrite();
    row_ = 0;
    beyond_ = index() - (told.get(kLastK) + 1);
    While (any(beyond_ < 0))
      // Where nothing else fills the instructions behind a branch.
      Int turn = 0;
      Int there = beyond_ >> 31;
      Int next = from_ + 4 * kPeriod;
      If (row_ == kHalfRows)
        beyond_ = beyond_ + kPeriod;
        advance(told, next);
        semaDec(kReadyToo);
      Else
        transpose(there);
        row_ = 0;
        semaDec(kReady);
      End
      semaInc(kRead);
      block(turn);
    End
    // One block more than there are, which says that all have read the last.
    semaDec(kReady);
    semaInc(kRead);
  }

  // Who has no tile waits for a half too: until then some may not have taken what they
  // were told last.
  void write(const Numbers& told, const Int& row, const Int& column) {
    Int rows = told.get(kM) - row;
    Int half = (me() & 1) * kRows;
    Ptr<Float> start = pointer<Float>(told.get(kC)) + row * told.get(kCStride);
    Float none;
    If (half == 0)
      semaDec(kHalf);
    Else
      semaDec(kOtherHalf);
    End
    // What is added comes by request too, and in order.
    if (variant_ == Variant::Accumulate) receiveRest();
    If (rows > 0)
      storeWhole(told, start, column, rows, half, none);
    End
    if (variant_ == Variant::Accumulate) {
      rows_ = rotate(rows_, kRows / 2);
      for (int r = 0; r < kRows / 2; r += 2) requestTwo();
    }
    If (half == 0)
      semaInc(kHalf);
    Else
      semaInc(kOtherHalf);
    End
    semaInc(kRead);
  }

 private:
  // Of the rows that are first in rows_, which are last then.
  void requestTwo() {
    for (const int r : {0, 1}) gather(pointer<Float>(broadcast(rows_, r) + from_));
    rows_ = rotate(rows_, 16 - 2);
  }
  // To the next 16 values of k, behind the last to those of the next tile.
  void advance(Numbers& told, const IntExpr& next) {
    Int last = told.get(kLast);
    from_ = next;
    If (all(from_ > last))
      Int group = told.get(kAhead) + step_;
      Where (group >= told.get(kM))
        group = 0;
      End
      told.put(kAhead, group);
      to(group, told);
    End
    from_ = min(from_, last);
  }
  // To the first of a tile. Rows that are not there are the last one again.
  void to(const IntExpr& group, const Numbers& told) {
    Int r = min(group + (me() - 1) * kRows + (index() & (kRows - 1)), told.get(kM) - 1);
    rows_ = told.get(kA) + ((r * told.get(kARow)) << 2);
    from_ = min(index(), told.get(kLastK)) << 2;
  }

  // Rows of 16 values of k become vectors with four values of k of every other row: vector
  // 2 t + r % 2 has row r's value 4 t + i in element 4 (r / 2) + i. Values of k that are not
  // there count as 0.
  void transpose(const Int& there) {
    for (Float& a : a_) a = asFloat(asInt(a) & there);
    for (int bit = kRows / 2; bit > 1; bit /= 2)
      for (int r = 0; r < kRows; ++r) {
        if ((r & bit) != 0) continue;
        Float& low = a_[at(r)];
        Float& high = a_[at(r + bit)];
        BoolExpr moved = (index() & (2 * bit)) != 0;
        Float first = select(moved, rotate(high, 2 * bit), low);
        high = select(moved, high, rotate(low, 16 - 2 * bit));
        low = first;
      }
  }

  // Half of it in a turn: the instructions of a whole one would fill the cache that
  // four QPUs share. A turn uses two vectors of a, and asks for and receives as many
  // of the next 16 values of k.
  void block(Int& turn) {
    While (turn < 2)
      turn = turn + 1;
      vpmSetupRead(HORIZ, kTurn * kAcross, row_);
      row_ = row_ + kTurn * kAcross;
      for (int k = 0; k < kTurn; ++k) {
        std::array<Float, kAcross> b;
        for (Float& v : b) v = vpmGetFloat();
        if (k == 1) requestTwo();
        for (const int r : kOrder[at(k)]) {
          Float one = broadcast(a_[at(r % 2)], r / 2 * kTurn + k);
          for (int i = 0; i < kAcross; ++i) {
            const int s = (kFromLeft[at(k)] >> r & 1U) != 0 ? i : kAcross - 1 - i;
            Float& sum = sum_[at(r)][at(s)];
            sum = sum + one * b[at(s)];
          }
        }
      }
      for (std::size_t v = 0; v + 2 < kRows; ++v) a_[v] = a_[v + 2];
      for (std::size_t v = kRows - 2; v < kRows; ++v) receive(a_[v]);
    End
  }

  const int step_;                 // rows of a group
  std::array<Float, kRows> a_;     // what is left of 16 values of k, then rows of the next
  Int rows_;                       // addresses of the rows; those to be asked for first
  Int from_;                       // bytes from there
  Int beyond_;                     // k - how many there are
  Int row_;                        // of the VPM: the next to be read
};

auto compileShared(Variant variant, int workers, const char* name) {
  return compile(
      [variant, workers](Ptr<Int> from) {
        Numbers told;
        told.fetch(from);
        If (me() == 0)
          serve(told, workers);
        Else
          SharedTile tile(variant, told, workers);
          Int column = 0;
          While (column < told.get(kN))
            Int group = 0;
            While (group < told.get(kM))
              told.put(kGroup, group);
              told.put(kColumn, column);
              tile.compute(told);
              group = told.get(kGroup);
              column = told.get(kColumn);
              tile.write(told, group + (me() - 1) * kRows, column);
              group = group + workers * kRows;
            End
            column = column + kColumns;
          End
          SharedTile::receiveRest();
        End
      },
      name);
}

}  // namespace

Shared shareable(const Product& p, int qpus) {
  Shared s;
  if ((qpus != 0 && qpus != kMostQpus) || p.bColumn != 1 || p.aColumn != 1 || p.k < kPeriod)
    return s;
  s.columns = p.n / kColumns * kColumns;
  // A last group that leaves many without a tile is left to the other kernel.
  const int group = kSharedWorkers * kRows;
  const int rest = p.m % group;
  s.rows = 4 * rest < 3 * group ? p.m - rest : p.m;
  if (s.columns == 0) s.rows = 0;
  return s;
}

void sharedProduct(const Product& p) {
  const Scratch told(16);
  int* const at = told.hostInts();
  at[kC] = bits(p.c.address());
  at[kCStride] = p.cStride;
  at[kA] = bits(p.a.address());
  at[kARow] = p.aRow;
  at[kB] = bits(p.b.address());
  at[kBRow] = p.bRow;
  at[kM] = p.m;
  at[kN] = p.n;
  at[kLastK] = p.k - 1;
  at[kAlpha] = bits(p.alpha);
  at[kBeta] = bits(p.beta);
  const std::int64_t gap = std::int64_t{4} * (p.cStride - kColumns);
  at[kGap] = gap >= 0 && gap <= kMostGap ? static_cast<int>(gap) : -1;
  if (p.beta == 0) {
    static const auto kernel = compileShared(Variant::Plain, kSharedWorkers, "matmul-shared");
    run(kernel, kMostQpus, told.ints());
    return;
  }
  static const auto kernel =
      compileShared(Variant::Accumulate, kSharedWorkers, "matmul-shared-accumulate");
  run(kernel, kMostQpus, told.ints());
}

}  // namespace qpu::kernels
