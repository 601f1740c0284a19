// Softmax of rows. Rows that fit are held in registers, so memory is read once and written once: by a part of a warp
// each up to 1024 columns, by a block each above that. Longer rows are read twice; the second time mostly from the L2
// cache.
//
// Memory is read in packs of 16 bytes wherever a row begins: the pack that a row begins in, and the one that it ends in,
// are gone through by single elements.
#include <algorithm>

#include "device.cuh"

namespace cuda_ops::cuda {
namespace {

constexpr int kThreadsOfRows = 128;
constexpr int kMostColumnsOfWarp = 1024;
constexpr int kMostThreads = 1024;

// One row of the input and of the output, as packs of kCount elements that begin at addresses of 16 bytes; `shift`
// elements of the first pack belong to the row before.
template <typename T, int kCount>
struct Row {
  const T* in;
  T* out;
  int shift;
  int64_t columns;

  __device__ Row(const Softmax& work, int64_t row)
      : in(static_cast<const T*>(work.in) + row * work.row_stride),
        out(static_cast<T*>(work.out) + row * work.columns),
        shift(kCount == 1 ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(in) / sizeof(T) % kCount)),
        columns(work.columns) {}

  [[nodiscard]] __device__ int64_t packs() const { return (columns + shift + kCount - 1) / kCount; }

  // Elements of pack i; those outside of the row are -inf, of which nothing remains.
  __device__ void load(int64_t i, float (&values)[kCount]) const {
    const int64_t first = i * kCount - shift;
    if (first >= 0 && first + kCount <= columns) {
      const auto pack = *reinterpret_cast<const Pack<T, kCount>*>(in + first);
#pragma unroll
      for (int e = 0; e < kCount; ++e) values[e] = to_float(pack.values[e]);
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e)
        values[e] = first + e >= 0 && first + e < columns ? to_float(in[first + e]) : -INFINITY;
    }
  }

  __device__ void store(int64_t i, const float (&values)[kCount]) const {
    const int64_t first = i * kCount - shift;
    if (first >= 0 && first + kCount <= columns) {
      Pack<T, kCount> pack;
#pragma unroll
      for (int e = 0; e < kCount; ++e) pack.values[e] = from_float<T>(values[e]);
      *reinterpret_cast<Pack<T, kCount>*>(out + first) = pack;
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e)
        if (first + e >= 0 && first + e < columns) out[first + e] = from_float<T>(values[e]);
    }
  }
};

// A row by `width` threads, of which this one is `thread`; each holds kPacks packs. `across` combines a value of each.
template <typename T, int kCount, int kPacks, typename Across>
__device__ inline void softmax_of_row(const Softmax& work, int64_t which, bool wanted, int thread, int width,
                                      Across across) {
  const Row<T, kCount> row(work, which);
  const int64_t packs = wanted ? row.packs() : 0;
  float values[kPacks][kCount];
  float largest = -INFINITY;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[k][e] = -INFINITY;
    if (thread + k * width < packs) row.load(thread + k * width, values[k]);
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
#pragma unroll
    for (int e = 0; e < kCount; ++e) largest = fmaxf(largest, values[k][e]);
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

template <typename T, int kCount, int kPacks, int kWidth>
__global__ void __launch_bounds__(kThreadsOfRows) warp_kernel(const Softmax work) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreadsOfRows / kWidth) + threadIdx.x / kWidth;
  softmax_of_row<T, kCount, kPacks>(work, min(row, work.rows - 1), row < work.rows,
                                    static_cast<int>(threadIdx.x) % kWidth, kWidth, [](float value, auto combine) {
                                      return across_warp<kWidth>(value, combine);
                                    });
}

template <typename T, int kCount, int kPacks>
__global__ void __launch_bounds__(kMostThreads) block_kernel(const Softmax work) {
  __shared__ float room[kWarp];
  softmax_of_row<T, kCount, kPacks>(work, blockIdx.x, true, static_cast<int>(threadIdx.x),
                                    static_cast<int>(blockDim.x),
                                    [](float value, auto combine) { return across_block(value, combine, room); });
}

// Largest value so far and the sum of exp(x - largest): two such parts of a row make one (online softmax, Milakov and
// Gimelshein 2018).
template <typename T, int kCount>
__global__ void __launch_bounds__(kMostThreads) long_kernel(const Softmax work) {
  __shared__ float room[kWarp];
  const Row<T, kCount> row(work, blockIdx.x);
  const int64_t packs = row.packs();
  float values[kCount];
  float largest = -INFINITY;
  float total = 0.0F;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs; i += kMostThreads) {
    row.load(i, values);
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
    row.load(i, values);
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[e] = expf(values[e] - all) * scale;
    row.store(i, values);
  }
}

template <typename T, int kCount>
int launch(const Softmax& work, cudaStream_t stream) {
  // A row that begins in the middle of a pack may need one more.
  const int64_t packs = work.columns / kCount + (work.columns % kCount == 0 ? 0 : 2);
  if (work.columns <= kMostColumnsOfWarp) {
    by_count<4, 8, 16, 32>(std::min<int64_t>(packs, kWarp), [&](auto width) {
      constexpr int kWidth = width();
      const auto blocks = static_cast<unsigned>(divide_up(work.rows, kThreadsOfRows / kWidth));
      const auto go = [&](auto count) {
        warp_kernel<T, kCount, count(), kWidth><<<blocks, kThreadsOfRows, 0, stream>>>(work);
      };
      if constexpr (kWidth < kWarp) {
        go(std::integral_constant<int, 1>{});
      } else if constexpr (kCount == 1) {
        by_count<1, 2, 4, 8, 16, 32>(divide_up(packs, kWarp), go);
      } else {
        by_count<1, 2, 3, 4, 5, 6, 8, 9>(divide_up(packs, kWarp), go);
      }
    });
    return cudaGetLastError();
  }
  const auto rows = static_cast<unsigned>(work.rows);
  if constexpr (kCount > 1) {
    // Four packs a thread and no more threads than that needs; longer rows take more packs.
    const int64_t threads = std::clamp<int64_t>(divide_up(divide_up(packs, 4), kWarp) * kWarp, 128, kMostThreads);
    const auto go = [&](auto count) {
      block_kernel<T, kCount, count()><<<rows, static_cast<unsigned>(threads), 0, stream>>>(work);
    };
    constexpr int kMostPacks = sizeof(T) == 4 ? 8 : 4;
    if (by_count<3, 4, kMostPacks>(divide_up(packs, threads), go)) return cudaGetLastError();
  }
  long_kernel<T, kCount><<<rows, kMostThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

}  // namespace

int run(const Softmax& work, void* stream) {
  if (work.rows == 0 || work.columns == 0) return cudaSuccess;
  auto* on = static_cast<cudaStream_t>(stream);
  return by_type(work.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kCount = kFullPack<T>;
    // Every row of the input begins as far from a pack's begin as that of the output.
    const bool packed = (reinterpret_cast<uintptr_t>(work.in) - reinterpret_cast<uintptr_t>(work.out)) % 16 == 0 &&
                        (work.row_stride - work.columns) % kCount == 0;
    // A grid has at most 2^31 - 1 blocks, and a row may take a block.
    constexpr int64_t kMostRows = 0x7fffffff;
    for (int64_t done = 0; done < work.rows; done += kMostRows) {
      Softmax part = work;
      part.rows = std::min(kMostRows, work.rows - done);
      part.in = static_cast<const T*>(work.in) + done * work.row_stride;
      part.out = static_cast<T*>(work.out) + done * work.columns;
      const int error = packed ? launch<T, kCount>(part, on) : launch<T, 1>(part, on);
      if (error != cudaSuccess) return error;
    }
    return static_cast<int>(cudaSuccess);
  });
}

}  // namespace cuda_ops::cuda
