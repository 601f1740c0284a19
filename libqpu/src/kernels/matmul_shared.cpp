// Large products in which the rows of `b` are contiguous. All QPUs except the first compute tiles
// of 8 rows by 64 columns. The tiles of different QPUs are one below the other. The first QPU loads
// `b` for the other QPUs into the VPM by DMA, in blocks of 8 rows. `b` is therefore transferred
// over the bus only once, and the computing QPUs need neither requests nor addresses for `b`. Each
// half of the VPM contains a block. One block is read while the other block is loaded.
//
// A request for `a` loads 16 values of k in one row. These values form a cache line that is not
// requested again. `a` therefore need not be copied, regardless of the distance between its rows.
// Eight of these rows are transposed in registers, so that two vectors contain the values of all
// rows for four values of k. During an iteration, both vectors stay in accumulators, where a
// broadcast takes one operation. After the last values of k, the first values for the next tile are
// requested, so that the QPUs do not wait for these values while stores occupy the bus.
//
// Between two tiles, the finished tiles are written to memory through the VPM, as in matmul.cpp.
//
// As in matmul.cpp, every sum is computed in the order of k, so the results are bit-identical.
#include "kernels/matmul_shared.hpp"

#include <algorithm>

#include "kernels/matmul_tile.hpp"

namespace qpu::kernels {
namespace {

constexpr int kBlock = 8;    // number of rows of `b` in a block
constexpr int kHalfRows = kBlock * kAcross;  // number of VPM rows in a half
constexpr int kPeriod = 16;  // number of values of k in a vector of `a`
constexpr int kDepth = 4;     // number of values of k per iteration, which are in two vectors of `a`
static_assert(2 * kHalfRows == 64 && kPeriod == 2 * kBlock,
              "a vector of a must be used for two blocks");
static_assert(kRows == 2 * kPeriod / kDepth, "an iteration must use two vectors of a");

// The semaphores. kReady and kReadyToo: a block is ready in the respective half. kRead: a QPU has
// stored its tile, or has started a block and has therefore finished reading the previous block.
// kHalf and kOtherHalf: the respective half is free for tiles.
enum Semaphore { kReady, kReadyToo, kRead, kHalf, kOtherHalf };

// The order in which the rows of a tile use each value of k in an iteration, and the rows that are
// computed from left to right (one bit each). An instruction can read only one register from each
// file, so the order determines how well the pipes are used. Of several thousand random orders,
// this order is the fastest.
constexpr std::array<std::array<int, kRows>, kDepth> kOrder{{
    {6, 5, 2, 4, 1, 0, 7, 3},
    {3, 5, 4, 0, 2, 6, 7, 1},
    {1, 4, 3, 0, 7, 6, 5, 2},
    {5, 1, 0, 6, 7, 3, 4, 2}}};
constexpr std::array<unsigned, kDepth> kFromLeft{0x23, 0xf5, 0xf1, 0xfa};

// Values that a QPU saves during the loop over k. The saved values replace parameters that this
// kernel does not use.
enum Saved { kGroup = kBColumn, kColumn = kAColumn, kAhead = kPacked, kLast = kStep };

void repeat(int times, int semaphore, void (*f)(int, Location)) {
  for (int i = 0; i < times; ++i) f(semaphore, QPU_HERE);
}
void acquire(int times, int semaphore) { repeat(times, semaphore, semaDec); }
void release(int times, int semaphore) { repeat(times, semaphore, semaInc); }

// Loads the next block of rows of `b`, or the remaining rows if there is no complete block.
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

// The program of the first QPU. It announces a block only after all QPUs have started the previous
// block. A fast QPU therefore cannot acquire a permission that was released for a slow QPU.
void serve(const Numbers& params, int workers) {
  Int rowBytes = params.get(kBRow) << 2;
  For (Int column = 0, column < params.get(kN), column = column + kColumns)
    For (Int group = 0, group < params.get(kM), group = group + workers * kRows)
      Ptr<Float> from = pointer<Float>(params.get(kB)) + column;
      Int half = 0;  // VPM address of the half that is loaded next
      Int left = params.get(kLastK) + 1;
      // The computing QPUs use blocks in pairs, and they wait for one more block than they use.
      For (Int blocks = (params.get(kLastK) >> 4) * 2 + 3, blocks > 0, blocks = blocks - 1)
        If (left > 0)
          load(from, left, half, rowBytes);
        End
        If (half == 0)
          release(workers, kReady);
        Else
          release(workers, kReadyToo);
        End
        half = half ^ (kHalfRows << 4);
        left = left - kBlock;
        from = from + params.get(kBRow) * kBlock;
        acquire(workers, kRead);
      End
      semaInc(kHalf);
      semaInc(kOtherHalf);
      acquire(workers, kRead);
      semaDec(kHalf);
      semaDec(kOtherHalf);
    End
  End
}

class SharedTile : public Sums {
 public:
  // Requests the values of `a` for the first block, and half of the values for the next two
  // blocks.
  SharedTile(Variant variant, Numbers& params, int workers) : Sums(variant), step_(workers * kRows) {
    params.put(kAhead, 0);
    params.put(kLast, params.get(kLastK) << 2);
    to(0, params);
    for (int r = 0; r < kRows; r += 2) requestTwo();
    advance(params, from_ + 4 * kPeriod);
    for (Float& a : a_) receive(a);
    for (int r = 0; r < kRows / 2; r += 2) requestTwo();
  }
  // Receives and discards the values that the last tile requested for a following tile.
  static void receiveRest() {
    Float unused;
    for (int r = 0; r < kRows / 2; ++r) receive(unused);
  }

  void compute(Numbers& params) {
    clear();
    // The DMA transfer has finished at this point. Without this wait, however, the compiler would
    // add a wait for each semaphore operation in the loop.
    dmaWaitWrite();
    row_ = 0;
    beyond_ = index() - (params.get(kLastK) + 1);
    While (any(beyond_ < 0))
      // These variables are assigned here so that the assignments fill the branch's delay slots.
      Int iteration = 0;
      Int there = beyond_ >> 31;
      Int next = from_ + 4 * kPeriod;
      If (row_ == kHalfRows)
        beyond_ = beyond_ + kPeriod;
        advance(params, next);
        semaDec(kReadyToo);
      Else
        transpose(there);
        row_ = 0;
        semaDec(kReady);
      End
      semaInc(kRead);
      block(iteration);
    End
    // After the last block, waits for one more block. The first QPU announces this additional block
    // when all QPUs have started the last block. By releasing kRead for the additional block, a QPU
    // signals that it has finished reading the last block.
    semaDec(kReady);
    semaInc(kRead);
  }

  // Stores the tile. A QPU without a tile also waits for a half, because, until a half is free,
  // some QPUs may not have acquired their last permission.
  void write(const Numbers& params, const Int& row, const Int& column) {
    Int rows = params.get(kM) - row;
    Int half = (me() & 1) * kRows;
    Ptr<Float> start = pointer<Float>(params.get(kC)) + row * params.get(kCStride);
    Float none;
    If (half == 0)
      semaDec(kHalf);
    Else
      semaDec(kOtherHalf);
    End
    // Accumulation also issues requests. Results arrive in request order, so the results of earlier
    // requests are received first.
    if (variant_ == Variant::Accumulate) receiveRest();
    If (rows > 0)
      storeWhole(params, start, column, rows, half, none);
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
  // Requests values of the first two rows in rows_, and then moves these rows to the end of
  // rows_.
  void requestTwo() {
    for (const int r : {0, 1}) gather(pointer<Float>(broadcast(rows_, r) + from_));
    rows_ = rotate(rows_, 16 - 2);
  }
  // Advances to the next 16 values of k. After the last values of k, advances to the next tile.
  void advance(Numbers& params, const IntExpr& next) {
    Int last = params.get(kLast);
    from_ = next;
    If (all(from_ > last))
      Int group = params.get(kAhead) + step_;
      Where (group >= params.get(kM))
        group = 0;
      End
      params.put(kAhead, group);
      to(group, params);
    End
    from_ = min(from_, last);
  }
  // Sets the addresses to the start of a tile. Rows beyond the end are replaced by the last row.
  void to(const IntExpr& group, const Numbers& params) {
    Int r = min(group + (me() - 1) * kRows + (index() & (kRows - 1)), params.get(kM) - 1);
    rows_ = params.get(kA) + ((r * params.get(kARow)) << 2);
    from_ = min(index(), params.get(kLastK)) << 2;
  }

  // Transposes rows of 16 values of k to vectors that contain four values of k from every second
  // row. Element 4 (r / 2) + i of vector 2 t + r % 2 contains value 4 t + i of row r. Values of k
  // beyond the end are treated as 0.
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

  // Computes half a block per iteration, because the instructions for a complete block would fill
  // the cache that four QPUs share. An iteration uses two vectors of `a`, and requests and receives
  // two vectors of the next 16 values of k.
  void block(Int& iteration) {
    While (iteration < 2)
      iteration = iteration + 1;
      vpmSetupRead(HORIZ, kDepth * kAcross, row_);
      row_ = row_ + kDepth * kAcross;
      for (int k = 0; k < kDepth; ++k) {
        std::array<Float, kAcross> b;
        for (Float& v : b) v = vpmGetFloat();
        if (k == 1) requestTwo();
        for (const int r : kOrder[at(k)]) {
          Float one = broadcast(a_[at(r % 2)], r / 2 * kDepth + k);
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

  const int step_;                 // number of rows in a group
  // The remaining vectors of these 16 values of k, followed by rows with the next 16 values.
  std::array<Float, kRows> a_;
  Int rows_;                       // addresses of the rows, starting with the rows to request next
  Int from_;                       // distance in bytes from rows_ to the next values
  Int beyond_;                     // current index k, minus the number of values of k
  Int row_;                        // the VPM row to read next
};

auto compileShared(Variant variant, int workers, const char* name) {
  return compile(
      [variant, workers](Ptr<Int> from) {
        Numbers params;
        params.fetch(from);
        If (me() == 0)
          serve(params, workers);
        Else
          SharedTile tile(variant, params, workers);
          Int column = 0;
          While (column < params.get(kN))
            Int group = 0;
            While (group < params.get(kM))
              params.put(kGroup, group);
              params.put(kColumn, column);
              tile.compute(params);
              group = params.get(kGroup);
              column = params.get(kColumn);
              tile.write(params, group + (me() - 1) * kRows, column);
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
  // If many QPUs would have no tile in the last group, the kernel in matmul.cpp computes this
  // group.
  const int group = kSharedWorkers * kRows;
  const int rest = p.m % group;
  s.rows = 4 * rest < 3 * group ? p.m - rest : p.m;
  if (s.columns == 0) s.rows = 0;
  return s;
}

void sharedProduct(const Product& p) {
  const Scratch params(16);
  int* const at = params.hostInts();
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
    run(kernel, kMostQpus, params.ints());
    return;
  }
  static const auto kernel =
      compileShared(Variant::Accumulate, kSharedWorkers, "matmul-shared-accumulate");
  run(kernel, kMostQpus, params.ints());
}

}  // namespace qpu::kernels
