// Matrix times vector: bound by reading the matrix once, so as much of it as possible is in flight.
//
// Where too few rows are there for all of the GPU, the columns are shared out among blocks as well, whose sums a second
// kernel adds up, in a fixed order: the same input gives the same output.
#include <algorithm>
#include <initializer_list>

#include "device.cuh"

namespace cuda_ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// Measured on an H200: how many packs a thread has in flight, and up to how many bytes of a row a warp takes rows alone.
template <typename T, int kGroup>
constexpr int kInFlight = sizeof(T) == 2 && kGroup == kWarp ? 4 : 8;
template <typename T, int kCount>
constexpr int kColumnsInFlight = sizeof(T) * kCount == 16 ? 2 : 8;
constexpr int64_t most_bytes_of_warp(Type type) {
  return type == Type::kFloat ? 8192 : (type == Type::kHalf ? 16384 : 32768);
}
constexpr int64_t kMostSplits = 512;

template <typename T>
__device__ inline void store(const Matvec& work, int64_t row, float sum) {
  if (work.splits > 1) {
    work.partial[static_cast<int64_t>(blockIdx.y) * work.rows + row] = sum;
  } else {
    static_cast<T*>(work.out)[row] = from_float<T>(sum);
  }
}

// Columns [first, last) of this block's part, in packs of kCount.
template <int kCount>
__device__ inline void part_of(const Matvec& work, int64_t& first, int64_t& last) {
  const int64_t packs = work.columns / kCount;
  const int64_t each = (packs + work.splits - 1) / work.splits;
  first = min(each * blockIdx.y, packs);
  last = min(first + each, packs);
}

template <typename T, int kCount>
__device__ inline float dot(const Pack<T, kCount>& a, const Pack<T, kCount>& x, float sum) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) sum = fmaf(to_float(a.values[e]), to_float(x.values[e]), sum);
  return sum;
}

// Rows whose columns are neighbours. A group of kGroup threads takes kRows of them, so that each element of the vector
// that it loads serves kRows products.
template <typename T, int kCount, int kRows, int kGroup>
__global__ void __launch_bounds__(kThreads) rows_kernel(const Matvec work) {
  using Packed = Pack<T, kCount>;
  constexpr int kSteps = kInFlight<T, kGroup> / kRows;
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup) * kRows;
  if (row >= work.rows) return;  // a whole warp or block

  const Packed* rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Beyond the last row the last one is computed again and not stored.
    const int64_t which = min(row + r, work.rows - 1);
    rows[r] = reinterpret_cast<const Packed*>(static_cast<const T*>(work.matrix) + which * work.row_stride);
  }
  const auto* vector = reinterpret_cast<const Packed*>(work.vector);
  int64_t first = 0;
  int64_t last = 0;
  part_of<kCount>(work, first, last);
  float sums[kRows] = {};
  int64_t i = first + thread;
  for (; i + (kSteps - 1) * kGroup < last; i += kSteps * kGroup) {
    Packed a[kSteps][kRows];
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int r = 0; r < kRows; ++r) a[s][r] = rows[r][i + s * kGroup];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const Packed x = vector[i + s * kGroup];
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = dot(a[s][r], x, sums[r]);
    }
  }
  for (; i < last; i += kGroup) {
    const Packed x = vector[i];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = dot(rows[r][i], x, sums[r]);
  }
  __shared__ float room[kWarp];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float sum = 0.0F;
    if constexpr (kGroup == kThreads) {
      sum = across_block(sums[r], Sum{}, room);
    } else {
      sum = across_warp<kGroup>(sums[r], Sum{});
    }
    if (thread == 0 && row + r < work.rows) store<T>(work, row + r, sum);
  }
}

// Columns whose rows are neighbours (a transposed matrix), and with kCount = 1 any strides. kWidth lanes stand side by
// side over kCount rows each; all such groups of a block take columns in turn.
template <typename T, int kCount, int kWidth>
__global__ void __launch_bounds__(kThreads) columns_kernel(const Matvec work) {
  using Packed = Pack<T, kCount>;
  constexpr int kGroups = kThreads / kWidth;
  constexpr int kFlight = kColumnsInFlight<T, kCount>;
  __shared__ float sums[kGroups][kWidth * kCount + 1];
  const int lane = static_cast<int>(threadIdx.x) % kWidth;
  const int group = static_cast<int>(threadIdx.x) / kWidth;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kWidth + lane) * kCount;
  int64_t first = 0;
  int64_t last = 0;
  part_of<1>(work, first, last);
  float mine[kCount] = {};
  if (row < work.rows) {
    const T* at = static_cast<const T*>(work.matrix) + row * work.row_stride;
    const T* vector = static_cast<const T*>(work.vector);
    int64_t i = first + group;
    const auto add = [&](const Packed& a, float x) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) mine[e] = fmaf(to_float(a.values[e]), x, mine[e]);
    };
    for (; i + (kFlight - 1) * kGroups < last; i += kFlight * kGroups) {
      Packed a[kFlight];
#pragma unroll
      for (int s = 0; s < kFlight; ++s)
        a[s] = *reinterpret_cast<const Packed*>(at + (i + s * kGroups) * work.column_stride);
#pragma unroll
      for (int s = 0; s < kFlight; ++s) add(a[s], to_float(vector[i + s * kGroups]));
    }
    for (; i < last; i += kGroups)
      add(*reinterpret_cast<const Packed*>(at + i * work.column_stride), to_float(vector[i]));
  }
#pragma unroll
  for (int e = 0; e < kCount; ++e) sums[group][lane * kCount + e] = mine[e];
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.x); r < kWidth * kCount; r += kThreads) {
    const int64_t which = static_cast<int64_t>(blockIdx.x) * kWidth * kCount + r;
    if (which >= work.rows) return;
    float sum = 0.0F;
#pragma unroll 8
    for (int g = 0; g < kGroups; ++g) sum += sums[g][r];
    store<T>(work, which, sum);
  }
}

// Adds up the parts: a warp stands over 32 rows, the warps of a block take parts in turn.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const Matvec work) {
  __shared__ float sums[kWarps][kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  float sum = 0.0F;
  if (row < work.rows) {
#pragma unroll 8
    for (int part = warp; part < work.splits; part += kWarps)
      sum += work.partial[static_cast<int64_t>(part) * work.rows + row];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || row >= work.rows) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += sums[w][lane];
  static_cast<T*>(work.out)[row] = from_float<T>(sum);
}

int multiprocessors() {
  int device = 0;
  int count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return std::max(count, 1);
}

// How the work is cut: what a block takes, and how many blocks there are in either direction.
struct Plan {
  bool by_columns = false;
  int pack = 1;       // elements that are read at once
  int rows = 1;       // by rows: of a group of threads
  int width = kWarp;  // by rows: threads of a group; by columns: lanes side by side
  int64_t blocks = 1;
  int64_t splits = 1;
};

// The largest pack of 16 or 8 bytes, and at least 4 elements, into which everything can be cut; else single elements.
int pack_of(Type type, int64_t run, int64_t stride, std::initializer_list<const void*> pointers) {
  for (const int bytes : {16, 8}) {
    const int count = bytes / size_of(type);
    if (count < 4) continue;
    const bool fits = std::all_of(pointers.begin(), pointers.end(), [&](const void* pointer) {
      return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
    });
    if (fits && run % count == 0 && stride % count == 0) return count;
  }
  return 1;
}

Plan plan(const Matvec& work) {
  const int64_t all = multiprocessors();
  Plan made;
  made.by_columns = work.column_stride != 1;
  int64_t fewest_columns = 0;
  int64_t wanted = 0;
  if (made.by_columns) {
    if (work.row_stride == 1) made.pack = pack_of(work.type, work.rows, work.column_stride, {work.matrix});
    const int64_t lanes = divide_up(work.rows, made.pack);
    while (made.width > 8 && made.width / 2 >= lanes) made.width /= 2;
    made.blocks = divide_up(lanes, made.width);
    fewest_columns = int64_t{8} * kThreads / made.width;
    wanted = 4 * all;
  } else {
    made.pack = pack_of(work.type, work.columns, work.row_stride, {work.matrix, work.vector});
    made.rows = work.rows >= 16 * all ? 4 : (work.rows >= 4 * all ? 2 : 1);
    const int64_t bytes = work.columns * size_of(work.type);
    const bool by_warps = bytes <= most_bytes_of_warp(work.type) && work.rows >= 4 * all;
    made.width = by_warps ? kWarp : kThreads;
    made.blocks = divide_up(work.rows, made.rows * (kThreads / made.width));
    fewest_columns = int64_t{kThreads} * made.pack * 2;
    wanted = made.blocks >= 2 * all || by_warps ? 1 : 4 * all;
  }
  const int64_t possible = std::max<int64_t>(work.columns / fewest_columns, 1);
  made.splits = std::min({divide_up(wanted, std::max<int64_t>(made.blocks, 1)), possible, kMostSplits});
  return made;
}

template <typename T, int kCount>
void launch(const Matvec& work, const Plan& made, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(made.blocks), static_cast<unsigned>(work.splits));
  if (made.by_columns) {
    by_count<8, 16, 32>(made.width, [&](auto width) {
      columns_kernel<T, kCount, width()><<<grid, kThreads, 0, stream>>>(work);
    });
  } else {
    by_count<1, 2, 4>(made.rows, [&](auto rows) {
      by_count<kWarp, kThreads>(made.width, [&](auto width) {
        rows_kernel<T, kCount, rows(), width()><<<grid, kThreads, 0, stream>>>(work);
      });
    });
  }
}

}  // namespace

int splits_of(const Matvec& work) { return work.rows == 0 ? 1 : static_cast<int>(plan(work).splits); }

int run(const Matvec& work, void* stream) {
  if (work.rows == 0) return cudaSuccess;
  auto* on = static_cast<cudaStream_t>(stream);
  return by_type(work.type, [&](auto zero) {
    using T = decltype(zero);
    const Plan made = plan(work);
    if constexpr (sizeof(T) == 4) {
      by_count<1, kFullPack<T>>(made.pack, [&](auto count) { launch<T, count()>(work, made, on); });
    } else {
      by_count<1, kFullPack<T> / 2, kFullPack<T>>(made.pack, [&](auto count) { launch<T, count()>(work, made, on); });
    }
    const int error = cudaGetLastError();
    if (error != cudaSuccess || work.splits == 1) return error;
    sum_kernel<T><<<static_cast<unsigned>(divide_up(work.rows, kWarp)), kThreads, 0, on>>>(work);
    return static_cast<int>(cudaGetLastError());
  });
}

}  // namespace cuda_ops::cuda
