// Softmax of rows. Rows that fit are held in registers, so memory is read once and written once: by a part of a warp
// each up to 1024 columns, by a block each above that. Longer rows are read twice; the second time mostly from the L2
// cache.
//
// Rows that begin anywhere are read in packs of 16 bytes all the same: what a pack holds of the rows before and after is
// masked. Only at the very ends of the tensor, and where the results are written, are single elements gone through.
#include <algorithm>

#include "device.cuh"

namespace cuda_ops::cuda {
namespace {

constexpr int kThreadsOfRows = 128;
constexpr int kMostColumnsOfWarp = 1024;
constexpr int kMostThreads = 1024;

// One row of the input and of the output, as packs of kCount elements at addresses that divide by a pack; `shift`
// elements of the first pack belong to the row before. Without kEdges a row begins and ends with a pack.
template <typename T, int kCount, bool kEdges>
struct Row {
  using Packed = Pack<T, kCount>;
  const T* in;
  T* out;
  int shift;
  int64_t columns;
  // Elements of the tensor before this row, and from its begin on: what may be read.
  int64_t before;
  int64_t after;

  __device__ Row(const Softmax& work, int64_t row)
      : in(static_cast<const T*>(work.in) + row * work.row_stride),
        out(static_cast<T*>(work.out) + row * work.columns),
        shift(kEdges ? static_cast<int>(reinterpret_cast<uintptr_t>(in) / sizeof(T) % kCount) : 0),
        columns(work.columns),
        before(row * work.row_stride),
        after((work.rows - 1 - row) * work.row_stride + work.columns) {}

  [[nodiscard]] __device__ int64_t packs() const { return (columns + shift + kCount - 1) / kCount; }
  // Whether the pack is this row's alone.
  [[nodiscard]] __device__ bool whole(int64_t i) const {
    return !kEdges || (i * kCount >= shift && (i + 1) * kCount - shift <= columns);
  }
  // Whether the pack lies in the tensor.
  [[nodiscard]] __device__ bool readable(int64_t i) const {
    return !kEdges || (i * kCount - shift >= -before && (i + 1) * kCount - shift <= after);
  }
  [[nodiscard]] __device__ Packed load(int64_t i) const {
    return *reinterpret_cast<const Packed*>(in + (i * kCount - shift));
  }
  // Elements outside of the row become -inf, of which nothing remains.
  [[nodiscard]] __device__ Packed masked(const Packed& pack, int64_t i) const {
    const int64_t first = i * kCount - shift;
    Bits bits(pack);
    const Bits nothing = Bits::of(from_float<T>(-INFINITY));
    if (first < 0) bits.take_low(nothing, static_cast<int>(-first));
    if (first + kCount > columns) bits.take_high(nothing, static_cast<int>(columns - first));
    return bits.pack();
  }
  // The same of a pack that is not readable as one. Loops over few elements stay loops: as straight code they would be
  // gone through, idle, for every pack.
  [[nodiscard]] __device__ Packed load_edge(int64_t i) const {
    Bits bits = Bits::of(from_float<T>(-INFINITY));
#pragma unroll 1
    for (int e = kCount - 1; e >= 0; --e) {
      const int64_t at = i * kCount - shift + e;
      bits.push(at >= 0 && at < columns ? in[at] : from_float<T>(-INFINITY));
    }
    return bits.pack();
  }
  __device__ void store(int64_t i, const float (&values)[kCount]) const {
    Packed pack;
#pragma unroll
    for (int e = 0; e < kCount; ++e) pack.values[e] = from_float<T>(values[e]);
    if (whole(i)) {
      *reinterpret_cast<Packed*>(out + (i * kCount - shift)) = pack;
      return;
    }
    if constexpr (kEdges) {
      Bits bits(pack);
#pragma unroll 1
      for (int e = 0; e < kCount; ++e) {
        const int64_t at = i * kCount - shift + e;
        const T value = bits.pop();
        if (at >= 0 && at < columns) out[at] = value;
      }
    }
  }

  // A pack as a number of 128 bits, element 0 the lowest.
  struct Bits {
    static constexpr int kBits = 8 * sizeof(T);
    unsigned long long low;
    unsigned long long high;

    __device__ Bits() : low(0), high(0) {}
    __device__ explicit Bits(const Packed& pack) : Bits() { memcpy(this, &pack, sizeof(pack)); }
    [[nodiscard]] __device__ Packed pack() const {
      Packed made;
      memcpy(&made, this, sizeof(made));
      return made;
    }
    // The same element everywhere.
    [[nodiscard]] __device__ static Bits of(T value) {
      Bits made;
      memcpy(&made.low, &value, sizeof(value));
      for (int filled = kBits; filled < 64; filled *= 2) made.low |= made.low << filled;
      made.high = made.low;
      return made;
    }
    [[nodiscard]] __device__ static unsigned long long ones(int count) {
      return count <= 0 ? 0ULL : (count >= 64 ? ~0ULL : (1ULL << count) - 1);
    }
    __device__ void take_low(const Bits& from, int elements) {
      const unsigned long long first = ones(elements * kBits);
      const unsigned long long second = ones(elements * kBits - 64);
      low = (low & ~first) | (from.low & first);
      high = (high & ~second) | (from.high & second);
    }
    __device__ void take_high(const Bits& from, int kept) {
      const Bits mine = *this;
      *this = from;
      take_low(mine, kept);
    }
    __device__ void push(T value) {
      unsigned long long bits = 0;
      memcpy(&bits, &value, sizeof(value));
      high = (high << kBits) | (low >> (64 - kBits));
      low = (low << kBits) | bits;
    }
    __device__ T pop() {
      T value;
      memcpy(&value, &low, sizeof(value));
      low = (low >> kBits) | (high << (64 - kBits));
      high >>= kBits;
      return value;
    }
  };
};

template <typename T, int kCount>
__device__ inline void unpack(const Pack<T, kCount>& pack, float (&values)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) values[e] = to_float(pack.values[e]);
}

// A row by `width` threads, of which this one is `thread`; each holds kPacks packs. `across` combines a value of each.
template <typename T, int kCount, int kPacks, bool kEdges, typename Across>
__device__ inline void softmax_of_row(const Softmax& work, int64_t which, bool wanted, int thread, int width,
                                      Across across) {
  const Row<T, kCount, kEdges> row(work, which);
  const int packs = wanted ? static_cast<int>(row.packs()) : 0;
  // All loads first, so that they are in flight together.
  Pack<T, kCount> held[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int i = thread + k * width;
    if (i < packs && row.readable(i)) held[k] = row.load(i);
  }
  float values[kPacks][kCount];
  float largest = -INFINITY;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int i = thread + k * width;
    if constexpr (kEdges) {
      if (i < packs && !row.readable(i)) {
        held[k] = row.load_edge(i);
      } else if (i < packs && !row.whole(i)) {
        held[k] = row.masked(held[k], i);
      }
    }
    unpack(held[k], values[k]);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      values[k][e] = i < packs ? values[k][e] : -INFINITY;
      largest = fmaxf(largest, values[k][e]);
    }
  }
  largest = across(largest, Maximum{});
  float total = 0.0F;
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      values[k][e] = expf(values[k][e] - largest);
      total += values[k][e];
    }
  const float scale = 1.0F / across(total, Sum{});
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[k][e] *= scale;
    if (thread + k * width < packs) row.store(thread + k * width, values[k]);
  }
}

template <typename T, int kCount, int kPacks, int kWidth, bool kEdges>
__global__ void __launch_bounds__(kThreadsOfRows) warp_kernel(const Softmax work) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreadsOfRows / kWidth) + threadIdx.x / kWidth;
  softmax_of_row<T, kCount, kPacks, kEdges>(work, min(row, work.rows - 1), row < work.rows,
                                    static_cast<int>(threadIdx.x) % kWidth, kWidth, [](float value, auto combine) {
                                      return across_warp<kWidth>(value, combine);
                                    });
}

template <typename T, int kCount, int kPacks, bool kEdges>
__global__ void __launch_bounds__(kMostThreads) block_kernel(const Softmax work) {
  __shared__ float room[kWarp];
  softmax_of_row<T, kCount, kPacks, kEdges>(work, blockIdx.x, true, static_cast<int>(threadIdx.x),
                                    static_cast<int>(blockDim.x),
                                    [](float value, auto combine) { return across_block(value, combine, room); });
}

// Largest value so far and the sum of exp(x - largest): two such parts of a row make one (online softmax, Milakov and
// Gimelshein 2018).
template <typename T, int kCount, bool kEdges>
__global__ void __launch_bounds__(kMostThreads) long_kernel(const Softmax work) {
  __shared__ float room[kWarp];
  const Row<T, kCount, kEdges> row(work, blockIdx.x);
  const auto load = [&](int64_t i, float(&values)[kCount]) {
    if constexpr (kEdges) {
      unpack(!row.readable(i) ? row.load_edge(i) : row.whole(i) ? row.load(i) : row.masked(row.load(i), i), values);
    } else {
      unpack(row.load(i), values);
    }
  };
  const int64_t packs = row.packs();
  float values[kCount];
  float largest = -INFINITY;
  float total = 0.0F;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs; i += kMostThreads) {
    load(i, values);
    float here = values[0];
#pragma unroll
    for (int e = 1; e < kCount; ++e) here = fmaxf(here, values[e]);
    if (here > largest) {
      total *= expf(largest - here);
      largest = here;
    }
    // While all are -inf there is nothing to add up, and exp(-inf - -inf) would be no number. NaN must go on.
    if (largest > -INFINITY || values[0] != values[0]) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) total += expf(values[e] - largest);
    }
  }
  const float all = across_block(largest, Maximum{}, room);
  if (largest != all) total *= expf(largest - all);
  const float scale = 1.0F / across_block(total, Sum{}, room);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs; i += kMostThreads) {
    load(i, values);
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[e] = expf(values[e] - all) * scale;
    row.store(i, values);
  }
}

template <typename T, int kCount, bool kEdges>
int launch(const Softmax& work, cudaStream_t stream) {
  // A row that begins in the middle of a pack may need one more.
  const int64_t packs = work.columns / kCount + (kEdges ? 2 : 0);
  if (work.columns <= kMostColumnsOfWarp) {
    by_count<4, 8, 16, 32>(std::min<int64_t>(packs, kWarp), [&](auto width) {
      constexpr int kWidth = width();
      const auto blocks = static_cast<unsigned>(divide_up(work.rows, kThreadsOfRows / kWidth));
      const auto go = [&](auto count) {
        warp_kernel<T, kCount, count(), kWidth, kEdges><<<blocks, kThreadsOfRows, 0, stream>>>(work);
      };
      if constexpr (kWidth < kWarp) {
        go(std::integral_constant<int, 1>{});
      } else if constexpr (kCount == 1) {
        by_count<1, 2, 4, 8, 16, 32>(divide_up(packs, kWarp), go);
      } else if constexpr (sizeof(T) == 4) {
        by_count<1, 2, 3, 4, 6, 8, 9>(divide_up(packs, kWarp), go);
      } else {
        by_count<1, 2, 3, 4, 5>(divide_up(packs, kWarp), go);
      }
    });
    return cudaGetLastError();
  }
  const auto rows = static_cast<unsigned>(work.rows);
  if constexpr (kCount > 1) {
    // Four packs a thread and no more threads than that needs; longer rows take more packs.
    const int64_t threads = std::clamp<int64_t>(divide_up(divide_up(packs, 4), kWarp) * kWarp, 128, kMostThreads);
    const auto go = [&](auto count) {
      block_kernel<T, kCount, count(), kEdges><<<rows, static_cast<unsigned>(threads), 0, stream>>>(work);
    };
    constexpr int kMostPacks = 32 / kCount;
    if (by_count<3, 4, kMostPacks>(divide_up(packs, threads), go)) return cudaGetLastError();
  }
  long_kernel<T, kCount, kEdges><<<rows, kMostThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

}  // namespace

int run(const Softmax& work, void* stream) {
  if (work.rows == 0 || work.columns == 0) return cudaSuccess;
  auto* on = static_cast<cudaStream_t>(stream);
  return by_type(work.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kCount = kFullPack<T>;
    const bool whole = work.columns % kCount == 0 && work.row_stride % kCount == 0 && aligned(work.in) &&
                       aligned(work.out);
    // Every row of the input begins as far from a pack's begin as that of the output.
    const bool alike = (reinterpret_cast<uintptr_t>(work.in) - reinterpret_cast<uintptr_t>(work.out)) % 16 == 0 &&
                       (work.row_stride - work.columns) % kCount == 0;
    // A grid has at most 2^31 - 1 blocks, and a row may take a block.
    constexpr int64_t kMostRows = 0x7fffffff;
    for (int64_t done = 0; done < work.rows; done += kMostRows) {
      Softmax part = work;
      part.rows = std::min(kMostRows, work.rows - done);
      part.in = static_cast<const T*>(work.in) + done * work.row_stride;
      part.out = static_cast<T*>(work.out) + done * work.columns;
      const int error = whole   ? launch<T, kCount, false>(part, on)
                        : alike ? launch<T, kCount, true>(part, on)
                                : launch<T, 1, false>(part, on);
      if (error != cudaSuccess) return error;
    }
    return static_cast<int>(cudaSuccess);
  });
}

}  // namespace cuda_ops::cuda
