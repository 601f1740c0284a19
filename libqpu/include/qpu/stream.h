// Iteration over arrays in kernels. These functions distribute blocks of vectors among workers and
// request data before it is needed. The vectors after the last complete block are handled
// separately.
//
// The kernels in qpu/kernels.h use this header, and other kernels can also use it. Unlike the other
// headers, this header requires C++17. Include this header after the headers of other libraries,
// because it defines macros with common names.
#ifndef QPU_STREAM_H
#define QPU_STREAM_H

#include <array>
#include <limits>

#include "qpu/macros.h"
#include "qpu/math.h"
#include "qpu/vpm.h"

namespace qpu::kernels {

// The number of outstanding requests per QPU. Every basic block of a kernel issues an even number
// of requests, so that the requests alternate between the TMUs in a fixed order.
constexpr int kInFlight = 8;

// The number of VPM rows that kernels use directly. These rows are divided equally among the QPUs.
// The compiler uses rows 52 and above.
constexpr int kVpmRows = 48;
// The number of vectors in a block. One DMA transfer stores a block. Starting a transfer takes as
// much time as storing many rows. In the same time, a few QPUs with long blocks therefore store
// more vectors than all QPUs with short blocks. This result comes from the cycle model and was not
// measured on hardware.
constexpr int kLong = 8;
constexpr int kShort = 4;
constexpr int kQpusWithLong = kVpmRows / kLong;
static_assert(kVpmRows / kShort == 12, "each of 12 QPUs must have enough rows for a short block");

// Returns true if each of `qpus` QPUs has enough rows for long blocks. Also returns true if
// `qpus` is 0, because the library then chooses the number of QPUs.
inline bool mayBeLong(int qpus) { return qpus <= kQpusWithLong; }
inline int orLong(int qpus) { return qpus == 0 ? kQpusWithLong : qpus; }
// Returns true if storing n elements takes less time with long blocks than with short blocks. The
// comparison includes the elements after the last complete block, which are stored vector by
// vector. Costs are measured in units of the time that one additional row in a transfer takes.
inline bool longPays(int n) {
  constexpr int start = 11;
  const auto cost = [n](int length) {
    const int block = 16 * length;
    return n / block * (start + length) + (n % block + 15) / 16 * (start + 1);
  };
  return cost(kLong) < cost(kShort);
}

template <std::size_t N>
using Vectors = std::array<Float, N>;
template <std::size_t N>
using Pointers = std::array<Ptr<Float>, N>;

// Issues one more request if the number of requests, N, is odd.
template <std::size_t N>
void evenGather(const PtrExpr<Float>& p) {
  if (N % 2 != 0) gather(p);
}
template <std::size_t N>
void evenReceive() {
  if (N % 2 != 0) {
    Float unused;
    receive(unused);
  }
}

// Iterates over n elements of the arrays `in`, in blocks of `Length` vectors. For each block that
// belongs to this worker, calls vector(j, x) for each vector number j, and then block(first). x
// contains vector j from each array, and `first` is the index of the block's first element. For the
// elements after the last complete block, calls tail(x, first, count) with up to 16 elements at a
// time. The elements of x from index `count` on are copies of the last valid element.
template <std::size_t N, int Length, typename OnVector, typename OnBlock, typename OnTail>
void walk(const Int& n, const Pointers<N>& in, const IntExpr& worker, const IntExpr& workers,
          OnVector vector, OnBlock block, OnTail tail) {
  constexpr int ahead = kInFlight / static_cast<int>(N);
  constexpr int shift = Length == kLong ? 7 : 6;
  static_assert(16 * Length == 1 << shift, "the length of a block must be a power of two");
  Int blocks = n >> shift;
  Int step = workers;
  Int first = worker;
  If (first < blocks)
    Pointers<N> next;
    Int fetched = first;
    for (std::size_t i = 0; i < N; ++i) next[i] = in[i] + ((first << shift) + index());
    int place = 0;
    const auto request = [&] {
      if (place == Length) {
        // After its last block, the worker requests the same block again and discards the data.
        place = 0;
        fetched = fetched + step;
        Int move = (step << shift) & ((fetched - blocks) >> 31);
        for (Ptr<Float>& p : next) p = p + move;
      }
      for (const Ptr<Float>& p : next) gather(p + 16 * place);
      ++place;
    };
    for (int i = 0; i < ahead; ++i) request();
    For (Int b = first, b < blocks, b = b + step)
      for (int j = 0; j < Length; ++j) {
        Vectors<N> x;
        for (Float& v : x) receive(v);
        request();
        vector(j, x);
      }
      block(b << shift);
    End
    Float unused;
    for (int i = 0; i < ahead * static_cast<int>(N); ++i) receive(unused);
  End

  Int rest = n & ((1 << shift) - 1);
  Int base = n - rest;
  For (Int t = first << 4, t < rest, t = t + (step << 4))
    Int count = min(rest - t, 16);
    Int at = base + t;
    Int lane = at + min(index(), count - 1);
    for (const Ptr<Float>& p : in) gather(p + lane);
    evenGather<N>(in[0] + lane);
    Vectors<N> x;
    for (Float& v : x) receive(v);
    evenReceive<N>();
    tail(x, at, count);
  End
}

// A compensated sum, in which rounding errors are corrected. The correction is limited to finite
// values, so a sum that has become Inf stays Inf.
struct Sum {
  Float total = 0;
  Float lost = 0;

  void add(const FloatExpr& x) {
    constexpr float most = std::numeric_limits<float>::max();
    Float y = x - lost;
    Float t = total + y;
    lost = qpu::min(qpu::max((t - total) - y, -most), most);
    total = t;
  }
};

// Returns the number of this QPU's first VPM row.
template <int Length>
IntExpr firstVpmRow() {
  return me() * Length;
}

// Stores vectors at `to` in one DMA transfer, which overlaps with the code after the call. The
// kernel must call finishBursts() before it stores in any other way, and before it ends.
template <std::size_t Length>
void burst(const std::array<Float, Length>& x, const PtrExpr<Float>& to, const IntExpr& vpmRow) {
  dmaWaitWrite();
  vpmSetupWrite(HORIZ, vpmRow);
  for (const Float& v : x) vpmPut(v);
  dmaSetWriteStride(0);
  dmaSetupWrite(HORIZ, static_cast<int>(Length), vpmRow << 4);
  dmaStartWrite(to);
}
inline void finishBursts() { dmaWaitWrite(); }

// Iterates over planes of `size` outputs each. Blocks of vectors are distributed round-robin among
// the QPUs. compute(plane, first) returns the vector that starts at output `first` of the plane.
// compute() is also called for vectors beyond the plane's end. whole(vectors, to) stores a complete
// block. rest(vectors, to, left) stores the last `left` outputs of a plane, which do not fill a
// block.
template <int Length, typename F, typename Whole, typename Rest>
void overBlocks(const Int& planes, const Int& size, const Ptr<Float>& out, F compute, Whole whole,
                Rest rest) {
  constexpr int block = 16 * Length;
  Int first = me() * block, plane = 0;
  Int rounded = (size + (block - 1)) & -block;
  const auto settle = [&] {
    While (first >= rounded)
      first = first - rounded;
      plane = plane + 1;
    End
  };
  settle();
  While (plane < planes)
    std::array<Float, Length> result;
    for (int j = 0; j < Length; ++j)
      result[static_cast<std::size_t>(j)] = compute(plane, first + 16 * j);
    Ptr<Float> to = out + (plane * size + first);
    Int left = size - first;
    If (left >= block)
      whole(result, to);
    Else
      rest(result, to, left);
    End
    first = first + numQPUs() * block;
    settle();
  End
  finishBursts();
}

// Calls overBlocks(), and stores each complete block with burst() and the other outputs with
// single stores.
template <int Length, typename F>
void overPlanes(const Int& planes, const Int& size, const Ptr<Float>& out, F compute) {
  Int vpmRow = firstVpmRow<Length>();
  overBlocks<Length>(
      planes, size, out, compute,
      [&](const std::array<Float, Length>& x, const Ptr<Float>& to) { burst(x, to, vpmRow); },
      [&](const std::array<Float, Length>& x, const Ptr<Float>& to, const Int& left) {
        finishBursts();
        for (int j = 0; j < Length; ++j) {
          If (left > 16 * j)
            store(x[static_cast<std::size_t>(j)], to + 16 * j, min(left - 16 * j, 16));
          End
        }
      });
}

}  // namespace qpu::kernels

#endif
