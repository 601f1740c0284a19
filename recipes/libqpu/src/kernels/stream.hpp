// How kernels walk along arrays: blocks of four vectors dealt to workers in
// turn, requests ahead of their use, and the vectors after the last whole block.
#ifndef QPU_SRC_KERNELS_STREAM_HPP
#define QPU_SRC_KERNELS_STREAM_HPP

#include <array>
#include <limits>

#include "qpu/macros.h"
#include "qpu/math.h"
#include "qpu/vpm.h"

namespace qpu::kernels {

// Requests that a QPU keeps in flight. Every straight piece of a kernel makes an
// even number of them, so that they alternate between the TMUs in a fixed way.
constexpr int kInFlight = 8;

constexpr int kVectors = 4;  // of a block
constexpr int kBlock = 16 * kVectors;

template <std::size_t N>
using Vectors = std::array<Float, N>;
template <std::size_t N>
using Pointers = std::array<Ptr<Float>, N>;

// A request that is not needed, so that their number is even.
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

// Calls vector(j, x) with vector j of each block of the n elements that is
// worker's, block(b) after the four of block number b, and tail(x, first, count)
// for up to 16 elements beyond the blocks; in x, elements from `count` on are
// copies of the last one.
template <std::size_t N, typename OnVector, typename OnBlock, typename OnTail>
void walk(const Int& n, const Pointers<N>& in, const IntExpr& worker, const IntExpr& workers,
          OnVector vector, OnBlock block, OnTail tail) {
  constexpr int ahead = kInFlight / static_cast<int>(N);
  Int blocks = n >> 6;
  Int step = workers;
  Int first = worker;
  If (first < blocks)
    Pointers<N> next;
    Int fetched = first;
    for (std::size_t i = 0; i < N; ++i) next[i] = in[i] + ((first << 6) + index());
    int place = 0;
    const auto request = [&] {
      if (place == kVectors) {
        // At the end the last block is asked for again, and dropped.
        place = 0;
        fetched = fetched + step;
        Int move = (step << 6) & ((fetched - blocks) >> 31);
        for (Ptr<Float>& p : next) p = p + move;
      }
      for (const Ptr<Float>& p : next) gather(p + 16 * place);
      ++place;
    };
    for (int i = 0; i < ahead; ++i) request();
    For (Int b = first, b < blocks, b = b + step)
      for (int j = 0; j < kVectors; ++j) {
        Vectors<N> x;
        for (Float& v : x) receive(v);
        request();
        vector(j, x);
      }
      block(b);
    End
    Float unused;
    for (int i = 0; i < ahead * static_cast<int>(N); ++i) receive(unused);
  End

  Int rest = n & (kBlock - 1);
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

// A sum with what its rounding has lost so far, which stays finite so that a
// sum that has become Inf stays that.
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

// Each QPU has four VPM rows for its bursts; rows from 48 on are the compiler's.
inline IntExpr firstVpmRow() { return me() << 2; }

// Stores four vectors at `to` in one DMA, overlapped with what follows.
// finishBursts() before the kernel stores in another way or ends.
inline void burst(const std::array<Float, kVectors>& x, const PtrExpr<Float>& to,
                  const IntExpr& vpmRow = firstVpmRow()) {
  dmaWaitWrite();
  vpmSetupWrite(HORIZ, vpmRow);
  for (const Float& v : x) vpmPut(v);
  dmaSetWriteStride(0);
  dmaSetupWrite(HORIZ, kVectors, vpmRow << 4);
  dmaStartWrite(to);
}
inline void finishBursts() { dmaWaitWrite(); }

}  // namespace qpu::kernels

#endif
