// Code that the two matrix-product kernels share. It defines the parameters, and converts a tile's
// sums to results in memory.
#ifndef QPU_SRC_KERNELS_MATMUL_TILE_HPP
#define QPU_SRC_KERNELS_MATMUL_TILE_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/matmul.hpp"
#include "qpu/stream.h"

namespace qpu::kernels {

constexpr int kRows = 8;
constexpr int kAcross = 4;  // number of vectors in a row of a tile
constexpr int kColumns = 16 * kAcross;
static_assert(kColumns == 64 && kRows == 8,
              "a row of a tile must fill a VPM column, and a tile half of the VPM");

enum class Variant { Plain, Accumulate, Tables };

// The parameters of a kernel, which are the elements of a vector in memory. With tables, kBRow and
// kBColumn are the addresses of the tables, and kBeta is the address of the bias. kLastK is k - 1.
// Bits 0..7 of kStep contain the number of rows of c that all QPUs together process at a time. The
// higher bits contain the number of rounds in which every QPU has a tile. kPacked is -1 if `a` is a
// copy, and 0 otherwise. For a copy, kARow is the stride of a row in a tile, and kAColumn is 8.
// kGap is the number of bytes between two rows of a tile in c, or -1 if DMA cannot skip this gap.
enum Param {
  kC, kCStride, kA, kARow, kB, kBColumn, kM, kN,
  kLastK, kAColumn, kBRow, kAlpha, kBeta, kStep, kPacked, kGap
};

// Maximum gap between rows of a DMA store, and maximum pitch of rows in a DMA load, in bytes.
constexpr int kMostGap = 8191;

template <typename T>
PtrExpr<T> pointer(const IntExpr& bytes) {
  return PtrExpr<T>(detail::FromNode(bytes.node()));
}
template <typename T>
IntExpr address(const PtrExpr<T>& p) {
  return IntExpr(detail::FromNode(p.node()));
}

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }

// Reinterprets the 32 bits of a float as an integer parameter.
inline int bits(float x) {
  int b = 0;
  std::memcpy(&b, &x, sizeof b);
  return b;
}
inline int bits(std::uint32_t x) { return static_cast<int>(x); }

// A vector whose elements are independent numbers.
class Numbers {
 public:
  // Requests the vector twice, so that the number of requests is even.
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

 private:
  Int all_;
};

// The sums of a tile, which are in registers.
class Sums {
 public:
  explicit Sums(Variant variant) : tables_(variant == Variant::Tables), variant_(variant) {}

 protected:
  void clear() {
    for (auto& r : sum_)
      for (Float& s : r) s = 0;
  }

  // Stores a complete tile. The tile's rows become columns in half of the VPM, and then rows in
  // memory. Each row is finished just before it is written to the VPM, so that the results do not
  // occupy registers in the meantime.
  void storeWhole(const Numbers& params, const Ptr<Float>& start, const Int& column,
                  const Int& rows, const Int& half, const Float& bias) {
    for (int r = 0; r < kRows; ++r) {
      finish(r, params, start, column, rows, kColumns, bias);
      vpmSetupWrite(VERT, half + r, 16);
      for (const Float& s : sum_[at(r)]) vpmPut(s);
    }
    Ptr<Float> to = start + column;
    Int gap = params.get(kGap);
    If (all(rows >= kRows && gap >= 0))
      dmaSetWriteStride(gap);
      dmaSetupWrite(VERT, kRows, half, kColumns);
      dmaStartWrite(to);
      dmaWaitWrite();
    Else
      dmaSetWriteStride(0);
      Int left = min(rows, kRows);
      Int vpm = half;
      While (left > 0)
        dmaSetupWrite(VERT, 1, vpm, kColumns);
        dmaStartWrite(to);
        vpm = vpm + 1;
        to = to + params.get(kCStride);
        left = left - 1;
        dmaWaitWrite();
      End
    End
  }

  void storeNarrow(const Numbers& params, const Ptr<Float>& start, const Int& column,
                   const Int& rows, const Int& width, const Float& bias) {
    for (int r = 0; r < kRows; ++r) {
      If (rows > r)
        finish(r, params, start, column, rows, width, bias);
        Ptr<Float> to = start + (column + params.get(kCStride) * r);
        for (int s = 0; s < kAcross; ++s) {
          If (width > 16 * s)
            store(sum_[at(r)][at(s)], to + 16 * s, min(width - 16 * s, 16));
          End
        }
      End
    }
  }

  // Converts the sums in row r to results.
  void finish(int r, const Numbers& params, const Ptr<Float>& start, const Int& column,
              const Int& rows, const IntExpr& width, const Float& bias) {
    std::array<Float, kAcross>& sums = sum_[at(r)];
    if (tables_) {
      for (Float& s : sums) s = s + broadcast(bias, r);
      return;
    }
    for (Float& s : sums) s = s * params.getFloat(kAlpha);
    if (variant_ == Variant::Plain) return;
    Ptr<Float> from = start + min(rows - 1, r) * params.get(kCStride);
    // These addresses are not computed with columnsOf(), because their terms would then stay in
    // registers.
    for (int s = 0; s < kAcross; ++s)
      gather(from + (column + (min(index(), width - (16 * s + 1)) + 16 * s)));
    for (Float& s : sums) {
      Float c;
      receive(c);
      s = s + c * params.getFloat(kBeta);
    }
  }

  const bool tables_;
  const Variant variant_;
  std::array<std::array<Float, kAcross>, kRows> sum_;
};

}  // namespace qpu::kernels

#endif
