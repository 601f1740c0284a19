// add2, exp and axpy are limited by memory bandwidth. Each thread processes 16 bytes of each
// operand, and many threads keep the memory busy.
#include <algorithm>

#include "device.cuh"

namespace cuda_ops::cuda {
namespace {

constexpr int kThreads = 256;

// Data that is read or written only once does not need to stay in the caches. The cache hints and
// block sizes below were the fastest in measurements on an H200. With two inputs, only the output
// has a hint. With one input, the input and the output have hints, except for 16-bit elements.
template <typename T, int kInputs>
constexpr bool kPlain = kInputs == 1 && sizeof(T) == 2;
template <typename T, int kInputs>
constexpr int kBlock = kPlain<T, kInputs> ? 128 : kThreads;

template <bool kOnce, typename Packed>
__device__ inline Packed read(const Packed* from) {
  if constexpr (kOnce) {
    return read_once(from);
  } else {
    const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from));
    return *reinterpret_cast<const Packed*>(&bits);
  }
}

template <bool kOnce, typename Packed>
__device__ inline void write(Packed* to, const Packed& value) {
  if constexpr (kOnce) {
    __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&value));
  } else {
    *to = value;
  }
}

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};

struct Axpy {
  float alpha;
  __device__ float operator()(float x, float y) const { return fmaf(alpha, x, y); }
};

struct Exp {
  __device__ float operator()(float x, float /*unused*/) const { return expf(x); }
};

// Processes `packs` complete packs. The last block then processes `rest` single elements.
template <typename T, int kInputs, typename F>
__global__ void __launch_bounds__(kBlock<T, kInputs>)
    dense_kernel(T* out, const T* a, const T* b, int64_t packs, int rest, F function) {
  constexpr int kCount = kFullPack<T>;
  using Packed = Pack<T, kCount>;
  const auto* pa = reinterpret_cast<const Packed*>(a);
  const auto* pb = reinterpret_cast<const Packed*>(b);
  auto* pout = reinterpret_cast<Packed*>(out);
  constexpr bool kMarked = !kPlain<T, kInputs>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock<T, kInputs> + threadIdx.x;
  if (i < packs) {
    Packed x = read<kInputs == 1 && kMarked>(pa + i);
    Packed y{};
    if constexpr (kInputs == 2) y = read<false>(pb + i);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float second = kInputs == 2 ? to_float(y.values[k]) : 0.0F;
      x.values[k] = from_float<T>(function(to_float(x.values[k]), second));
    }
    write<kMarked>(pout + i, x);
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < rest) {
    const int64_t last = packs * kCount + threadIdx.x;
    out[last] = from_float<T>(function(to_float(a[last]), kInputs == 2 ? to_float(b[last]) : 0.0F));
  }
}

// Supports operands with any strides. `Index` is the type of positions. `Index` has 32 bits where
// possible, because 32-bit division is faster.
template <typename T, typename Index, typename F>
__global__ void __launch_bounds__(kThreads) strided_kernel(const Elementwise work, F function) {
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < static_cast<Index>(work.count);
       i += step) {
    Index left = i;
    int64_t offset[Elementwise::kOperands] = {0, 0, 0};
    for (int d = work.dims - 1; d >= 0; --d) {
      const auto size = static_cast<Index>(work.sizes[d]);
      const Index quotient = d == 0 ? 0 : left / size;
      const int64_t position = left - quotient * size;
#pragma unroll
      for (int operand = 0; operand < Elementwise::kOperands; ++operand)
        offset[operand] += position * work.strides[operand][d];
      left = quotient;
    }
    const float a = to_float(static_cast<const T*>(work.in[0])[offset[1]]);
    const float b = work.inputs == 2 ? to_float(static_cast<const T*>(work.in[1])[offset[2]]) : 0.0F;
    static_cast<T*>(work.out)[offset[0]] = from_float<T>(function(a, b));
  }
}

template <typename T, int kInputs, typename F>
int launch(const Elementwise& work, F function, cudaStream_t stream) {
  if (work.dense() && aligned(work.out) && aligned(work.in[0]) && aligned(work.in[1])) {
    const int64_t packs = work.count / kFullPack<T>;
    const int rest = static_cast<int>(work.count % kFullPack<T>);
    constexpr int kThreadsHere = kBlock<T, kInputs>;
    const int64_t blocks = std::max<int64_t>(1, divide_up(packs, kThreadsHere));
    dense_kernel<T, kInputs><<<static_cast<unsigned>(blocks), kThreadsHere, 0, stream>>>(
        static_cast<T*>(work.out), static_cast<const T*>(work.in[0]), static_cast<const T*>(work.in[1]), packs, rest,
        function);
    return cudaGetLastError();
  }
  constexpr int64_t kMaxBlocks = 1 << 20;
  const auto blocks = static_cast<unsigned>(std::min(kMaxBlocks, divide_up(work.count, kThreads)));
  // The index type must also be able to represent a position one step past the end.
  // NOLINTNEXTLINE(bugprone-branch-clone): the branches differ in a type
  if (work.count + kMaxBlocks * kThreads < (int64_t{1} << 32)) {
    strided_kernel<T, uint32_t><<<blocks, kThreads, 0, stream>>>(work, function);
  } else {
    strided_kernel<T, uint64_t><<<blocks, kThreads, 0, stream>>>(work, function);
  }
  return cudaGetLastError();
}

}  // namespace

int run(const Elementwise& work, void* stream) {
  if (work.count == 0) return cudaSuccess;
  auto* on = static_cast<cudaStream_t>(stream);
  return by_type(work.type, [&](auto zero) {
    using T = decltype(zero);
    switch (work.function) {
      case Function::kAdd:
        return launch<T, 2>(work, Add{}, on);
      case Function::kExp:
        return launch<T, 1>(work, Exp{}, on);
      case Function::kAxpy:
        return launch<T, 2>(work, Axpy{work.alpha}, on);
    }
    return static_cast<int>(cudaErrorInvalidValue);
  });
}

const char* explain(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int current_device() {
  int device = -1;
  return cudaGetDevice(&device) == cudaSuccess ? device : -1;
}

}  // namespace cuda_ops::cuda
