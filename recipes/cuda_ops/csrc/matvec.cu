// A matrix-vector multiplication takes at least the time to read the matrix once. The kernels
// therefore keep as many loads in flight as possible. They load packs of 16 bytes, even if rows
// or columns are not aligned.
//
// If too few blocks would have work, the columns are also distributed among blocks. A second kernel
// then adds the sums of the blocks in a fixed order, so the same input always produces the same
// output.
#include <algorithm>

#include "device.cuh"

namespace cuda_ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSmallBlock = 128;
constexpr int kMiddleBlock = 512;
constexpr int kLargeBlock = 1024;  // number of threads that keep a multiprocessor busy, in one or more blocks

// Stores the sum of a row, or the sum of this block's part of the row.
template <typename T>
__device__ inline void store(const Matvec& work, int64_t row, float sum) {
  if (work.splits > 1) {
    work.partial[static_cast<int64_t>(blockIdx.y) * work.rows + row] = sum;
  } else {
    static_cast<T*>(work.out)[row] = from_float<T>(sum);
  }
}

// Computes the range [first, last) of `count` that this block processes.
__device__ inline void part_of(const Matvec& work, int64_t count, int64_t& first, int64_t& last) {
  const int64_t each = (count + work.splits - 1) / work.splits;
  first = min(each * blockIdx.y, count);
  last = min(first + each, count);
}

// Allows the second kernel to start now. The second kernel then waits until this kernel ends, so
// its launch takes no additional time.
__device__ inline void start_next() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

template <typename T, int kCount>
__device__ inline float dot(const Pack<T, kCount>& a, const float (&x)[kCount], float sum) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) sum = fmaf(to_float(a.values[e]), x[e], sum);
  return sum;
}

// Returns the number of packs of a row that a thread loads before it uses the first one. If the
// number is 1, the kernel is a simple loop that the compiler unrolls twice and that runs with many
// threads. On an H200, larger numbers are faster only for unaligned float32.
constexpr int flight_of(int count, int rows, bool edges) {
  if (!edges || count != 4) return 1;
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

// Returns the minimum number of blocks per multiprocessor. If it is 0, the compiler chooses the
// number. The compiler then reduces the number of loads in flight to save registers, so that more
// blocks fit.
constexpr int blocks_for(int flight, int group) { return group == kLargeBlock ? 1 : flight > 1 ? 4 : 0; }

constexpr int block_of(int group) { return group > kThreads ? group : kThreads; }

// For matrices whose rows are contiguous. A group of kGroup threads processes kRows rows, so that
// each element of the vector that it loads is used for kRows products. With kEdges, rows may be
// unaligned: there are single elements before the first complete pack and after the last one. Rows
// whose numbers differ by a multiple of kCount have the same alignment, so the rows of a group are
// kCount rows apart.
template <typename T, int kCount, int kRows, int kGroup, bool kEdges>
__global__ void __launch_bounds__(block_of(kGroup), blocks_for(flight_of(kCount, kRows, kEdges), kGroup))
    rows_kernel(const Matvec work) {
  using Packed = Pack<T, kCount>;
  constexpr int kApart = kEdges ? kCount : 1;
  constexpr int kFlight = flight_of(kCount, kRows, kEdges);
  constexpr int kSingles = kEdges ? divide_up(2 * kCount, kGroup) : 0;
  start_next();
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * (block_of(kGroup) / kGroup) + threadIdx.x / kGroup;
  const int64_t row = group / kApart * (kApart * kRows) + group % kApart;
  const auto* matrix = static_cast<const T*>(work.matrix);
  const T* rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // A row number past the last row is replaced: the first row is computed again, but its sum is
    // not stored.
    rows[r] = matrix + (row + r * kApart < work.rows ? row + r * kApart : row) * work.row_stride;
  }
  int head = 0;
  if constexpr (kEdges) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(rows[0]) / sizeof(T) % kCount);
    head = static_cast<int>(min(static_cast<int64_t>((kCount - shift) % kCount), work.columns));
  }
  const int64_t packs = row < work.rows ? (work.columns - head) / kCount : 0;
  const auto* vector = static_cast<const T*>(work.vector);
  float sums[kRows] = {};
  // Calls `use(k, where)` for each single element that this thread processes. A thread processes at
  // most kSingles single elements.
  const auto each_single = [&](auto use) {
    if (blockIdx.y != 0 || row >= work.rows) return;
    const int64_t tail = head + packs * kCount;
#pragma unroll
    for (int k = 0; k < kSingles; ++k) {
      const int j = thread + k * kGroup;
      const int64_t at = j < kCount ? j : tail + (j - kCount);
      if (j < 2 * kCount && at < (j < kCount ? head : work.columns)) use(k, at);
    }
  };
  // With packs in flight, single elements are loaded first and used last. Otherwise they are used
  // immediately.
  float singles[kSingles + 1][kRows] = {};
  float singles_x[kSingles + 1] = {};
  if constexpr (kFlight > 1) {
    each_single([&](int k, int64_t at) {
      singles_x[k] = to_float(vector[at]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) singles[k][r] = to_float(rows[r][at]);
    });
  } else {
    each_single([&](int, int64_t at) {
      const float x = to_float(vector[at]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = fmaf(to_float(rows[r][at]), x, sums[r]);
    });
  }
  int64_t first = 0;
  int64_t last = 0;
  part_of(work, packs, first, last);
  int64_t i = first + thread;
  if constexpr (kFlight > 1) {
    const auto add = [&](auto all) {
      Packed a[kFlight][kRows];
      T x[kFlight][kCount];
#pragma unroll
      for (int s = 0; s < kFlight; ++s) {
        const int64_t at = head + (i + s * kGroup) * kCount;
        const bool there = all() || i + s * kGroup < last;
#pragma unroll
        for (int r = 0; r < kRows; ++r) a[s][r] = there ? *reinterpret_cast<const Packed*>(rows[r] + at) : Packed{};
#pragma unroll
        for (int e = 0; e < kCount; ++e) x[s][e] = there ? vector[at + e] : T{};
      }
#pragma unroll
      for (int s = 0; s < kFlight; ++s)
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r] = dot(a[s][r], x[s], sums[r]);
    };
    for (; i + (kFlight - 1) * kGroup < last; i += kFlight * kGroup) add(std::true_type{});
    add(std::false_type{});
    i = last;
#pragma unroll
    for (int k = 0; k < kSingles; ++k)
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = fmaf(singles[k][r], singles_x[k], sums[r]);
  }
  for (; i < last; i += kGroup) {
    // The pack is copied, because the compiler would load single elements through a reference.
    Packed a[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // The distance between single elements can be any number.
      const T* at = rows[r] + (kCount == 1 ? i * work.column_stride : head + i * kCount);
      a[r] = *reinterpret_cast<const Packed*>(at);
    }
    float x[kCount];
    if constexpr (kEdges) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) x[e] = to_float(vector[head + i * kCount + e]);
    } else {
      const Packed some = reinterpret_cast<const Packed*>(vector)[i];
      unpack(some, x);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = dot(a[r], x, sums[r]);
  }
  __shared__ float room[kWarp];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float sum = 0.0F;
    if constexpr (kGroup > kWarp) {
      sum = across_block(sums[r], Sum{}, room);
    } else {
      sum = across_warp<kGroup>(sums[r], Sum{});
    }
    if (thread == 0 && row + r * kApart < work.rows) store<T>(work, row + r * kApart, sum);
  }
}

// Returns the number of threads that add the parts of a row if there are `threads` threads for each
// row. The number is a power of two and at most the size of a warp.
constexpr int sharers_of(int threads) {
  int count = 1;
  while (count < kWarp && count * 2 <= threads) count *= 2;
  return count;
}

// Returns the minimum number of blocks per multiprocessor. If a multiprocessor runs only
// kLargeBlock threads, each thread has enough registers for kFlight columns at the same time. If
// the result is 0, the compiler chooses the number.
constexpr int registers_for(int block, bool edges) { return block == kThreads || edges ? 0 : kLargeBlock / block; }

// For matrices whose columns are contiguous (transposed matrices) and, with kCount = 1, for any
// strides. Each of kWidth adjacent lanes covers kCount rows. The groups in a block process the
// columns in round-robin order. With kEdges, columns may be unaligned: the first lane of a group
// then starts up to one pack before the block's rows. Columns whose numbers differ by a multiple of
// kCount have the same alignment, so all columns of a group are aligned in the same way. With
// kKeep, the matrix stays in the L2 cache for the next product. Without kKeep, the elements are
// loaded with a hint that they are read only once, and they occupy only cache space that other data
// does not use.
template <typename T, int kCount, int kWidth, int kBlock, int kFlight, bool kEdges, bool kKeep = false>
__global__ void __launch_bounds__(kBlock, registers_for(kBlock, kEdges)) columns_kernel(const Matvec work) {
  using Packed = Pack<T, kCount>;
  constexpr int kGroups = kBlock / kWidth;
  constexpr int kTile = (kWidth - (kEdges ? 1 : 0)) * kCount;
  constexpr bool kShuffled = !kEdges && kWidth < kWarp;  // the sums of the groups in a warp are added first
  constexpr int kParts = kShuffled ? kBlock / kWarp : kGroups;
  constexpr int kSharers = sharers_of(kBlock / kTile);
  static_assert(!kEdges || kGroups % kCount == 0);
  __shared__ float sums[kParts][kWidth * kCount + 1];
  start_next();
  const int lane = static_cast<int>(threadIdx.x) % kWidth;
  const int group = static_cast<int>(threadIdx.x) / kWidth;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kTile;
  int64_t first = 0;
  int64_t last = 0;
  part_of(work, work.columns, first, last);
  int64_t i = first + group;
  const auto* matrix = static_cast<const T*>(work.matrix);
  const auto* vector = static_cast<const T*>(work.vector);
  int shift = 0;
  if constexpr (kEdges)
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(matrix + base + i * work.column_stride) / sizeof(T) % kCount);
  const int64_t row = base + lane * kCount - shift;
  float mine[kCount] = {};
  if (row < work.rows && (!kEdges || row + kCount > 0)) {
    const T* at = matrix + row * work.row_stride;
    const auto load = [&](int64_t column) {
      const auto* from = reinterpret_cast<const Packed*>(at + column * work.column_stride);
      if constexpr (kKeep) return *from;
      return read_once(from);
    };
    const auto add = [&](const Packed& a, float x) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) mine[e] = fmaf(to_float(a.values[e]), x, mine[e]);
    };
    // Handle the first and the last columns, in which a pack could extend past the matrix.
    const auto add_singly = [&](int64_t column) {
      const float x = to_float(vector[column]);
#pragma unroll
      for (int e = 0; e < kCount; ++e)
        if (row + e >= 0 && row + e < work.rows)
          mine[e] = fmaf(to_float(at[column * work.column_stride + e]), x, mine[e]);
    };
    if (kEdges && i == 0 && i < last) {
      add_singly(i);
      i += kGroups;
    }
    const int64_t end = kEdges ? min(last, work.columns - 1) : last;
    for (; i + (kFlight - 1) * kGroups < end; i += kFlight * kGroups) {
      Packed a[kFlight];
#pragma unroll
      for (int s = 0; s < kFlight; ++s) a[s] = load(i + s * kGroups);
#pragma unroll
      for (int s = 0; s < kFlight; ++s) add(a[s], to_float(vector[i + s * kGroups]));
    }
#pragma unroll 4
    for (; i < end; i += kGroups) add(load(i), to_float(vector[i]));
    if (kEdges && i < last) add_singly(i);
  }
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if constexpr (kShuffled) {
#pragma unroll
      for (int distance = kWidth; distance < kWarp; distance *= 2)
        mine[e] += __shfl_xor_sync(kAllLanes, mine[e], distance);
    }
    const int at = lane * kCount + e - shift;
    if (at >= 0 && (!kShuffled || threadIdx.x % kWarp < kWidth))
      sums[kShuffled ? threadIdx.x / kWarp : group][at] = mine[e];
  }
  __syncthreads();
  // All lanes of a warp must participate in the sum across the warp.
  for (int begin = 0; begin < kTile; begin += kBlock / kSharers) {
    const int r = begin + static_cast<int>(threadIdx.x) / kSharers;
    float sum = 0.0F;
    if (r < kTile) {
#pragma unroll 8
      for (int p = static_cast<int>(threadIdx.x) % kSharers; p < kParts; p += kSharers) sum += sums[p][r];
    }
    sum = across_warp<kSharers>(sum, Sum{});
    if (threadIdx.x % kSharers == 0 && r < kTile && base + r < work.rows) store<T>(work, base + r, sum);
  }
}

// Adds the partial sums. kSharers threads add the partial sums of each row.
template <typename T, int kSharers>
__global__ void __launch_bounds__(kThreads) sum_kernel(const Matvec work) {
  constexpr int kRows = kThreads / kSharers;
  __shared__ float sums[kSharers][kRows];
  wait_for_previous();
  const int place = static_cast<int>(threadIdx.x) % kRows;
  const int sharer = static_cast<int>(threadIdx.x) / kRows;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + place;
  float sum = 0.0F;
  if (row < work.rows) {
#pragma unroll 8
    for (int part = sharer; part < work.splits; part += kSharers)
      sum += work.partial[static_cast<int64_t>(part) * work.rows + row];
  }
  sums[sharer][place] = sum;
  __syncthreads();
  if (sharer != 0 || row >= work.rows) return;
#pragma unroll
  for (int s = 1; s < kSharers; ++s) sum += sums[s][place];
  static_cast<T*>(work.out)[row] = from_float<T>(sum);
}

// Properties of the current GPU. Each thread queries them once, and again if the device changes.
struct Gpu {
  int device = -1;
  int multiprocessors = 1;
  int cache = 0;  // size of its L2 cache in bytes
  // True if the GPU's code for the second kernel waits until the first kernel ends. The second
  // kernel can then start early.
  bool waits = false;
};

const Gpu& gpu() {
  thread_local Gpu known;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device == known.device) return known;
  Gpu found;
  cudaFuncAttributes code{};
  if (cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&found.cache, cudaDevAttrL2CacheSize, device) != cudaSuccess ||
      cudaFuncGetAttributes(&code, sum_kernel<float, kWarp>) != cudaSuccess)
    return known;
  found.device = device;
  found.waits = code.ptxVersion >= 90;
  return known = found;
}

// Returns true if the matrix may still be in the L2 cache when it is needed again.
bool fits_cache(const Matvec& work) {
  return 4 * work.rows * work.columns <= int64_t{3} * gpu().cache / size_of(work.type);
}

// The division of the work: what a block processes, and the number of blocks in each direction.
struct Plan {
  bool by_columns = false;
  bool edges = false;
  int pack = 1;   // elements per load
  int rows = 1;   // for division by rows: rows per group of threads
  int width = 1;  // for division by rows: threads per group; by columns: adjacent lanes
  int block = kThreads;  // threads per block
  int64_t blocks = 1;
  int64_t splits = 1;
};

// The constants in the two planning functions were measured on an H200.
Plan plan_rows(const Matvec& work, int full) {
  const int64_t all = gpu().multiprocessors;
  Plan made;
  made.pack = work.column_stride == 1 ? full : 1;
  made.edges = made.pack > 1 && (work.columns % full != 0 || work.row_stride % full != 0 || !aligned(work.matrix) ||
                                 !aligned(work.vector));
  const int64_t packs = work.columns / made.pack;
  // There are so few rows that each row needs many threads.
  const bool few = work.rows * kWarp < int64_t{kThreads} * all;
  const bool cached = fits_cache(work);
  const int64_t apart = made.edges ? full : 1;
  const auto blocks = [&](int width) {
    return divide_up(divide_up(work.rows, apart * made.rows) * apart, block_of(width) / width);
  };
  if (made.edges && full == 4 && packs >= 64 && !(few && packs < kThreads)) {
    // Use many packs per thread, with several in flight, and no more blocks than the GPU runs at
    // the same time.
    if (few) {
      made.width = kThreads;
      made.rows = work.rows < 2 * apart ? 1 : 2;
    } else {
      made.width = kWarp;
      while (made.width > 8 && (blocks(made.width) > 4 * all || packs < 32 * made.width)) made.width /= 2;
      if (cached && blocks(made.width) > 4 * all) made.rows = 2;
    }
  } else {
    // Use at least four packs per thread. If there are few rows, use fewer, so that enough
    // threads have work.
    made.width = 4;
    for (const int width : {8, 16, kWarp}) {
      if (packs >= 4 * width || (packs >= width && work.rows * made.width < 1024 * all)) made.width = width;
    }
    if (packs >= (made.edges ? 8 : 4) * kThreads || (packs >= kThreads && few)) made.width = kThreads;
    // If there is about one row per multiprocessor, use large blocks. This avoids partial sums,
    // which would have to be added later.
    if (made.pack > 1 && !made.edges && work.rows <= all && 2 * work.rows >= all && packs >= kLargeBlock)
      made.width = kLargeBlock;
    if (made.edges && (full > 4 || (made.width == kWarp && cached))) made.rows = 2;
    if (made.width == 4 && packs < 8 && work.rows >= 1024 * all) made.rows = 4;
  }
  made.block = block_of(made.width);
  made.blocks = blocks(made.width);
  if (made.width == kThreads) {
    // With packs in flight, a multiprocessor runs only four blocks at the same time.
    const bool flight = flight_of(made.pack, made.rows, made.edges) > 1;
    const int64_t wanted = flight ? 4 * all / made.blocks : divide_up(4 * all, made.blocks);
    made.splits = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(packs / (2 * kThreads), 1));
  }
  return made;
}

// For blocks of kThreads threads, returns the width of the column tiles. The widest tiles are used
// only if there are then at least `wide` of them.
template <typename Tiles>
int small_width(Tiles tiles, int64_t all, int64_t wide) {
  int width = 4;
  while (width < 16 && tiles(width) > 1) width *= 2;
  const bool fills = tiles(16) > 3 * all && tiles(16) <= 4 * all;
  return !fills && tiles(kWarp) >= wide ? kWarp : width;
}

// For blocks of kMiddleBlock threads, returns the width that results in about two blocks per
// multiprocessor, or 1 if no width does.
template <typename Tiles>
int middle_width(Tiles tiles, int64_t all) {
  int best = 1;
  int64_t most = 0;
  for (const int width : {kWarp, 2 * kWarp}) {
    const int64_t blocks = 2 * all / tiles(width) * tiles(width);
    if (most < 2 * all * 17 / 20 && blocks > most) {
      most = blocks;
      best = width;
    }
  }
  return best;
}

Plan plan_columns(const Matvec& work, int full) {
  const int64_t all = gpu().multiprocessors;
  Plan made;
  made.by_columns = true;
  const bool one = work.columns == 1;
  made.pack = work.row_stride == 1 && (one || work.column_stride >= full) ? full : 1;
  made.edges = made.pack > 1 && (work.rows % full != 0 || !aligned(work.matrix) ||
                                 (!one && work.column_stride % full != 0));
  const auto tiles = [&](int width) { return divide_up(work.rows, int64_t{width - (made.edges ? 1 : 0)} * made.pack); };
  const int64_t busy = int64_t{kLargeBlock} * all;  // number of threads that keep the whole GPU busy
  // The minimum is three quarters of these threads, or half if the matrix may still be in the L2 cache.
  const int least = fits_cache(work) ? 2 : 3;
  if (made.pack == 1) {
    made.width = work.rows <= 8 ? 8 : kWarp;
  } else if (made.edges) {
    const bool wide = full == 4 && tiles(kWarp) >= 16;
    if (wide) made.width = middle_width(tiles, all);
    if (made.width > 1) {
      made.block = kMiddleBlock;
    } else {
      made.width = wide ? 2 * kWarp : small_width(tiles, all, 16);
    }
  } else if (work.columns < 32) {
    made.width = kThreads;
  } else if (full == 8 && work.columns >= 512 && work.rows >= 512) {
    // A tile covers one cache line of each column. Prefer blocks that all run at the same time
    // and leave no parts to add later. If that is not possible, use the smallest blocks that need
    // at most 16 parts.
    made.width = 8;
    made.block = kLargeBlock;
    while (made.block > kSmallBlock && made.block * tiles(8) > busy) made.block /= 2;
    if (4 * made.block * tiles(8) < least * busy) {
      const auto parts = [&](int64_t block) { return std::min(busy / (block * tiles(8)), 2 * work.columns / block); };
      made.block = kSmallBlock;
      while (made.block < kLargeBlock && parts(made.block) > 16) made.block *= 2;
    }
  } else {
    // About one large block per multiprocessor leaves no parts to add later.
    if (work.columns >= 512) {
      for (const int width : {kWarp, 16, 8})
        if (tiles(width) <= all) made.width = 4 * tiles(width) > least * all ? width : 1;
    }
    if (made.width > 1) {
      made.block = kLargeBlock;
    } else {
      made.width = small_width(tiles, all, 64);
      if (2 * tiles(8) >= all && tiles(8) <= all) made.width = 8;
    }
  }
  made.blocks = tiles(made.width);
  // Use no more blocks than the GPU runs at the same time, and at least four columns per thread.
  made.splits = std::clamp<int64_t>(busy / (made.block * made.blocks), 1,
                                    std::max<int64_t>(work.columns * made.width / (4 * made.block), 1));
  return made;
}

Plan plan(const Matvec& work) {
  const int full = 16 / size_of(work.type);
  const bool by_columns = work.row_stride == 1 ? work.column_stride != 1 || work.columns == 1
                                               : work.column_stride != 1 && work.row_stride < work.column_stride;
  return by_columns ? plan_columns(work, full) : plan_rows(work, full);
}

template <typename T, int kCount, bool kEdges>
void launch_rows(const Matvec& work, const Plan& made, dim3 grid, cudaStream_t stream) {
  by_count<4, 8, 16, kWarp, kThreads, kLargeBlock>(made.width, [&](auto width) {
    constexpr int kWidth = width();
    if constexpr (kWidth == kLargeBlock) {
      if constexpr (kCount > 1 && !kEdges)
        rows_kernel<T, kCount, 1, kWidth, false><<<grid, kLargeBlock, 0, stream>>>(work);
    } else if (made.rows == 1) {
      rows_kernel<T, kCount, 1, kWidth, kEdges><<<grid, kThreads, 0, stream>>>(work);
    } else if (kWidth == 4 && made.rows == 4) {
      rows_kernel<T, kCount, 4, 4, kEdges><<<grid, kThreads, 0, stream>>>(work);
    } else if constexpr (kEdges) {
      rows_kernel<T, kCount, 2, kWidth, kEdges><<<grid, kThreads, 0, stream>>>(work);
    }
  });
}

// Launches wide float32 tiles with unaligned columns.
template <typename T, int kWidth, int kBlock>
void launch_wide(const Matvec& work, dim3 grid, cudaStream_t stream) {
  constexpr int kCount = kFullPack<T>;
  if (fits_cache(work)) {
    columns_kernel<T, kCount, kWidth, kBlock, 8, true, true><<<grid, kBlock, 0, stream>>>(work);
  } else {
    columns_kernel<T, kCount, kWidth, kBlock, 8, true><<<grid, kBlock, 0, stream>>>(work);
  }
}

template <typename T, bool kEdges>
void launch_columns(const Matvec& work, const Plan& made, dim3 grid, cudaStream_t stream) {
  constexpr int kCount = kFullPack<T>;
  constexpr int kFlight = 8;
  if constexpr (kEdges && kCount == 4) {
    if (made.block == kMiddleBlock) {
      by_count<kWarp, 2 * kWarp>(made.width, [&](auto width) {
        launch_wide<T, width(), kMiddleBlock>(work, grid, stream);
      });
      return;
    }
    if (made.width > kWarp) {
      launch_wide<T, 2 * kWarp, kThreads>(work, grid, stream);
      return;
    }
  }
  if constexpr (!kEdges) {
    if (made.block == kLargeBlock) {
      by_count<8, 16, kWarp>(made.width, [&](auto width) {
        columns_kernel<T, kCount, width(), kLargeBlock, 4, false><<<grid, kLargeBlock, 0, stream>>>(work);
      });
      return;
    }
    if (made.width == kThreads) {
      columns_kernel<T, kCount, kThreads, kThreads, kFlight, false><<<grid, kThreads, 0, stream>>>(work);
      return;
    }
    if constexpr (kCount == 8) {
      if (made.block == kSmallBlock) {
        columns_kernel<T, kCount, 8, kSmallBlock, kFlight, false><<<grid, kSmallBlock, 0, stream>>>(work);
        return;
      }
      if (made.block == kMiddleBlock) {
        columns_kernel<T, kCount, 8, kMiddleBlock, kFlight, false><<<grid, kMiddleBlock, 0, stream>>>(work);
        return;
      }
    }
  }
  by_count<4, 8, 16, kWarp>(made.width, [&](auto width) {
    columns_kernel<T, kCount, width(), kThreads, kFlight, kEdges><<<grid, kThreads, 0, stream>>>(work);
  });
}

template <typename T>
void launch(const Matvec& work, const Plan& made, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(made.blocks), static_cast<unsigned>(work.splits));
  if (made.by_columns && made.pack == 1) {
    by_count<8, kWarp>(made.width, [&](auto width) {
      columns_kernel<T, 1, width(), kThreads, 8, false><<<grid, kThreads, 0, stream>>>(work);
    });
  } else if (made.by_columns) {
    made.edges ? launch_columns<T, true>(work, made, grid, stream) : launch_columns<T, false>(work, made, grid, stream);
  } else if (made.pack == 1) {
    launch_rows<T, 1, false>(work, made, grid, stream);
  } else if (made.edges) {
    launch_rows<T, kFullPack<T>, true>(work, made, grid, stream);
  } else {
    launch_rows<T, kFullPack<T>, false>(work, made, grid, stream);
  }
}

template <typename T>
int add_up(const Matvec& work, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = gpu().waits ? 1 : 0;
  // If there are many rows, each row has few parts.
  constexpr int kFew = 4;
  const bool many = work.rows > 4096;
  config.gridDim = static_cast<unsigned>(divide_up(work.rows, kThreads / (many ? kFew : kWarp)));
  return cudaLaunchKernelEx(&config, many ? sum_kernel<T, kFew> : sum_kernel<T, kWarp>, work);
}

}  // namespace

int splits_of(const Matvec& work) { return work.rows == 0 ? 1 : static_cast<int>(plan(work).splits); }

int run(const Matvec& work, void* stream) {
  if (work.rows == 0) return cudaSuccess;
  auto* on = static_cast<cudaStream_t>(stream);
  return by_type(work.type, [&](auto zero) {
    using T = decltype(zero);
    launch<T>(work, plan(work), on);
    const int error = cudaGetLastError();
    return error != cudaSuccess || work.splits == 1 ? error : add_up<T>(work, on);
  });
}

}  // namespace cuda_ops::cuda
