// Softmax of rows. If a row fits into registers, memory is read once and written once. Each row of
// up to 1024 columns is processed by part of a warp, and each longer row by a block. Rows that do
// not fit are read twice, the second time mostly from the L2 cache.
//
// Unaligned rows are also processed in packs of 16 bytes. The single elements before the first
// complete pack and after the last one are distributed among the threads in addition to the
// packs. Contiguous rows of fewer than two packs go through shared memory, with one thread per
// row.
#include <algorithm>

#include "device.cuh"

namespace cuda_ops::cuda {
namespace {

constexpr int kThreadsOfRows = 128;
constexpr int kMaxColumnsOfWarp = 1024;
constexpr int kPacksOfLane = 2;
constexpr int kMaxThreads = 1024;

// Unaligned rows that are shorter than this consist mostly of single elements.
template <typename T>
constexpr int kLeastWithEdges = 2 * kFullPack<T>;

// A row of the input and of the output. It consists of `packs` packs of kCount elements at
// aligned addresses, and of single elements: the first `head` elements, and the elements from
// position `tail` on. Without kEdges there are no single elements.
template <typename T, int kCount, bool kEdges, typename Index>
struct Row {
  using Packed = Pack<T, kCount>;
  const T* in;
  T* out;
  Index columns;
  int head = 0;
  Index packs;
  Index tail;

  __device__ Row(const Softmax& work, int64_t row)
      : in(static_cast<const T*>(work.in) + row * work.row_stride),
        out(static_cast<T*>(work.out) + row * work.columns),
        columns(static_cast<Index>(work.columns)) {
    if constexpr (kEdges) {
      const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(in) / sizeof(T) % kCount);
      head = static_cast<int>(min(static_cast<Index>((kCount - shift) % kCount), columns));
    }
    packs = (columns - head) / kCount;
    tail = head + packs * kCount;
  }

  [[nodiscard]] __device__ Packed load(Index i) const { return reinterpret_cast<const Packed*>(in + head)[i]; }
  __device__ void store(Index i, const float (&values)[kCount]) const {
    Packed pack;
#pragma unroll
    for (int e = 0; e < kCount; ++e) pack.values[e] = from_float<T>(values[e]);
    reinterpret_cast<Packed*>(out + head)[i] = pack;
  }

  // There are at most kCount single elements on either side. They are numbered consecutively.
  // single() returns the position of a single element, or -1.
  static constexpr int kSingles = kEdges ? 2 * kCount : 0;
  [[nodiscard]] __device__ Index single(int number) const {
    if (number < kCount) return number < head ? number : -1;
    const Index at = tail + (number - kCount);
    return number < kSingles && at < columns ? at : -1;
  }
};

// Processes a row with `width` threads. This thread is number `thread`. Each thread holds kPacks
// packs and kLoose single elements. `across` combines one value from each thread.
template <typename T, int kCount, int kPacks, int kLoose, bool kEdges, typename Across>
__device__ inline void softmax_of_row(const Softmax& work, int64_t which, bool wanted, int thread, int width,
                                      Across across) {
  const Row<T, kCount, kEdges, int> row(work, which);
  const int packs = wanted ? row.packs : 0;
  // All loads come first, so that they are in flight at the same time. The loads have no branches.
  // Past the end, the last pack is read again.
  Pack<T, kCount> held[kPacks];
  if (!kEdges || row.packs > 0) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) held[k] = row.load(min(thread + k * width, row.packs - 1));
  }
  float loose[kLoose > 0 ? kLoose : 1];
#pragma unroll
  for (int k = 0; k < kLoose; ++k) {
    const int at = row.single(thread + k * width);
    loose[k] = wanted && at >= 0 ? to_float(row.in[at]) : -INFINITY;
  }
  float values[kPacks][kCount];
  float largest = -INFINITY;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    unpack(held[k], values[k]);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      values[k][e] = thread + k * width < packs ? values[k][e] : -INFINITY;
      largest = fmaxf(largest, values[k][e]);
    }
  }
#pragma unroll
  for (int k = 0; k < kLoose; ++k) largest = fmaxf(largest, loose[k]);
  largest = across(largest, Maximum{});
  float total = 0.0F;
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      values[k][e] = expf(values[k][e] - largest);
      total += values[k][e];
    }
#pragma unroll
  for (int k = 0; k < kLoose; ++k) {
    loose[k] = expf(loose[k] - largest);
    total += loose[k];
  }
  const float scale = 1.0F / across(total, Sum{});
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[k][e] *= scale;
    if (thread + k * width < packs) row.store(thread + k * width, values[k]);
  }
#pragma unroll
  for (int k = 0; k < kLoose; ++k) {
    const int at = row.single(thread + k * width);
    if (wanted && at >= 0) row.out[at] = from_float<T>(loose[k] * scale);
  }
}

template <typename T, int kCount, int kPacks, int kWidth, bool kEdges>
__global__ void __launch_bounds__(kThreadsOfRows) warp_kernel(const Softmax work) {
  constexpr int kLoose = kEdges ? (2 * kCount + kWidth - 1) / kWidth : 0;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreadsOfRows / kWidth) + threadIdx.x / kWidth;
  softmax_of_row<T, kCount, kPacks, kLoose, kEdges>(
      work, min(row, work.rows - 1), row < work.rows, static_cast<int>(threadIdx.x) % kWidth, kWidth,
      [](float value, auto combine) { return across_warp<kWidth>(value, combine); });
}

template <typename T, int kCount, int kPacks, bool kEdges>
__global__ void __launch_bounds__(kMaxThreads) block_kernel(const Softmax work) {
  __shared__ float room[kWarp];
  softmax_of_row<T, kCount, kPacks, kEdges ? 1 : 0, kEdges>(
      work, blockIdx.x, true, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
      [](float value, auto combine) { return across_block(value, combine, room); });
}

// The largest value of a part of a row, and the sum of exp(x - largest). Two parts of a row can
// be merged (online softmax, Milakov and Gimelshein 2018).
struct Part {
  float largest = -INFINITY;
  float total = 0.0F;

  template <int kCount>
  __device__ void add(const float (&values)[kCount]) {
    float here = values[0];
#pragma unroll
    for (int e = 1; e < kCount; ++e) here = fmaxf(here, values[e]);
    if (here > largest) {
      total *= expf(largest - here);
      largest = here;
    }
    // As long as all values are -inf, there is nothing to add, and exp(-inf - -inf) would be NaN.
    // A NaN in the input must be preserved.
#pragma unroll
    for (int e = 0; e < kCount; ++e)
      if (largest > -INFINITY || isnan(values[e])) total += expf(values[e] - largest);
  }
};

template <typename T, int kCount, bool kEdges>
__global__ void __launch_bounds__(kMaxThreads) long_kernel(const Softmax work) {
  __shared__ float room[kWarp];
  const Row<T, kCount, kEdges, int64_t> row(work, blockIdx.x);
  const int64_t single = kEdges ? row.single(static_cast<int>(min(threadIdx.x, unsigned{2 * kCount}))) : -1;
  Part mine;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < row.packs; i += kMaxThreads) {
    float values[kCount];
    unpack(row.load(i), values);
    mine.add(values);
  }
  if (single >= 0) {
    const float value[1] = {to_float(row.in[single])};
    mine.add(value);
  }
  const float all = across_block(mine.largest, Maximum{}, room);
  if (mine.largest != all) mine.total *= expf(mine.largest - all);
  const float scale = 1.0F / across_block(mine.total, Sum{}, room);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < row.packs; i += kMaxThreads) {
    float values[kCount];
    unpack(row.load(i), values);
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[e] = expf(values[e] - all) * scale;
    row.store(i, values);
  }
  if (single >= 0) row.out[single] = from_float<T>(expf(to_float(row.in[single]) - all) * scale);
}

// For dense rows of fewer than kLeastWithEdges elements. A block reads and writes the elements of
// its threads in complete packs, except for the last elements of the last block.
template <typename T>
__global__ void __launch_bounds__(kThreadsOfRows) narrow_kernel(const Softmax work) {
  constexpr int kCount = kFullPack<T>;
  constexpr int kMaxElements = kLeastWithEdges<T>;
  using Packed = Pack<T, kCount>;
  static_assert(kThreadsOfRows % kCount == 0);  // the rows of every block are aligned
  __shared__ Packed room[kThreadsOfRows * kMaxElements / kCount];
  auto* const elements = reinterpret_cast<T*>(room);
  const int thread = static_cast<int>(threadIdx.x);
  const int columns = static_cast<int>(work.columns);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreadsOfRows * columns;
  const auto* in = static_cast<const T*>(work.in) + begin;
  auto* out = static_cast<T*>(work.out) + begin;
  const int count = static_cast<int>(min(static_cast<int64_t>(kThreadsOfRows * columns), work.rows * columns - begin));
  const int packs = count / kCount;
  for (int i = thread; i < packs; i += kThreadsOfRows) room[i] = reinterpret_cast<const Packed*>(in)[i];
  for (int i = packs * kCount + thread; i < count; i += kThreadsOfRows) elements[i] = in[i];
  __syncthreads();
  if (thread * columns < count) {
    T* const row = elements + thread * columns;
    float values[kMaxElements];
    float largest = -INFINITY;
#pragma unroll
    for (int e = 0; e < kMaxElements; ++e) {
      values[e] = e < columns ? to_float(row[e]) : -INFINITY;
      largest = fmaxf(largest, values[e]);
    }
    float total = 0.0F;
#pragma unroll
    for (int e = 0; e < kMaxElements; ++e) {
      values[e] = expf(values[e] - largest);
      total += values[e];
    }
    const float scale = 1.0F / total;
#pragma unroll
    for (int e = 0; e < kMaxElements; ++e)
      if (e < columns) row[e] = from_float<T>(values[e] * scale);
  }
  __syncthreads();
  for (int i = thread; i < packs; i += kThreadsOfRows) reinterpret_cast<Packed*>(out)[i] = room[i];
  for (int i = packs * kCount + thread; i < count; i += kThreadsOfRows) out[i] = elements[i];
}

template <typename T, int kCount, bool kEdges>
int launch(const Softmax& work, cudaStream_t stream) {
  const int64_t packs = work.columns / kCount;
  if (work.columns <= kMaxColumnsOfWarp) {
    // Use the smallest number of lanes such that each lane has at most kPacksOfLane packs.
    // Rows with many packs use complete warps and more packs per lane. A row with one pack for
    // each lane of a warp is read and written in a single step.
    const int64_t lanes = packs == kWarp ? kWarp : std::min<int64_t>(divide_up(packs, kPacksOfLane), kWarp);
    const auto launch_with = [&](auto width) {
      constexpr int kWidth = width();
      const auto blocks = static_cast<unsigned>(divide_up(work.rows, kThreadsOfRows / kWidth));
      const auto go = [&](auto count) {
        warp_kernel<T, kCount, count(), kWidth, kEdges><<<blocks, kThreadsOfRows, 0, stream>>>(work);
      };
      if constexpr (kWidth < kWarp) {
        by_count<1, kPacksOfLane>(divide_up(packs, kWidth), go);
      } else if constexpr (kCount == 1) {
        by_count<1, 2, 4, 8, 16, 32>(divide_up(packs, kWarp), go);
      } else if constexpr (sizeof(T) == 4) {
        by_count<1, 2, 3, 4, 6, 8>(divide_up(packs, kWarp), go);
      } else {
        by_count<1, 2, 3, 4>(divide_up(packs, kWarp), go);
      }
    };
    if constexpr (kEdges) {
      by_count<4, 8, 16, 32>(lanes, launch_with);
    } else {
      by_count<1, 2, 4, 8, 16, 32>(lanes, launch_with);
    }
    return cudaGetLastError();
  }
  const auto rows = static_cast<unsigned>(work.rows);
  if constexpr (kCount > 1) {
    // Use four packs per thread, and only as many threads as this requires. Longer rows use more
    // packs per thread.
    const int64_t threads = std::clamp<int64_t>(divide_up(divide_up(packs, 4), kWarp) * kWarp, 128, kMaxThreads);
    const auto go = [&](auto count) {
      block_kernel<T, kCount, count(), kEdges><<<rows, static_cast<unsigned>(threads), 0, stream>>>(work);
    };
    constexpr int kMaxPacks = 32 / kCount;
    if (by_count<3, 4, kMaxPacks>(divide_up(packs, threads), go)) return cudaGetLastError();
  }
  long_kernel<T, kCount, kEdges><<<rows, kMaxThreads, 0, stream>>>(work);
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
    // True if each input row has the same alignment as the corresponding output row.
    const bool alike = (reinterpret_cast<uintptr_t>(work.in) - reinterpret_cast<uintptr_t>(work.out)) % 16 == 0 &&
                       (work.row_stride - work.columns) % kCount == 0;
    // A grid has at most 2^31 - 1 blocks, and each row may need its own block.
    constexpr int64_t kMaxRows = 0x7fffffff;
    for (int64_t done = 0; done < work.rows; done += kMaxRows) {
      Softmax part = work;
      part.rows = std::min(kMaxRows, work.rows - done);
      part.in = static_cast<const T*>(work.in) + done * work.row_stride;
      part.out = static_cast<T*>(work.out) + done * work.columns;
      int error = cudaSuccess;
      if (whole) {
        error = launch<T, kCount, false>(part, on);
      } else if (alike && work.columns >= kLeastWithEdges<T>) {
        error = launch<T, kCount, true>(part, on);
      } else if (work.columns < kLeastWithEdges<T> && work.row_stride == work.columns && aligned(part.in) &&
                 aligned(part.out)) {
        const auto blocks = static_cast<unsigned>(divide_up(part.rows, kThreadsOfRows));
        narrow_kernel<T><<<blocks, kThreadsOfRows, 0, on>>>(part);
        error = cudaGetLastError();
      } else {
        error = launch<T, 1, false>(part, on);
      }
      if (error != cudaSuccess) return error;
    }
    return static_cast<int>(cudaSuccess);
  });
}

}  // namespace cuda_ops::cuda
