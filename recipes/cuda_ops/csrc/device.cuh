// Parts that the kernels share: memory accesses of 16 bytes, and sums and maxima across threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels.h"

namespace cuda_ops::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffU;

// The elements of one memory access: 16 bytes if everything is aligned to 16 bytes, and a single
// element otherwise.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

template <typename T>
constexpr int kFullPack = 16 / static_cast<int>(sizeof(T));

// Reads data that does not need to stay in the caches because it is read only once.
template <typename Packed>
__device__ inline Packed read_once(const Packed* from) {
  if constexpr (sizeof(Packed) == sizeof(uint4)) {
    const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(from));
    return *reinterpret_cast<const Packed*>(&bits);
  } else {
    return *from;
  }
}

inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <typename T, int kCount>
__device__ inline void unpack(const Pack<T, kCount>& pack, float (&values)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) values[e] = to_float(pack.values[e]);
}

struct Sum {
  static constexpr float kNeutral = 0.0F;
  __device__ float operator()(float a, float b) const { return a + b; }
};

struct Maximum {
  static constexpr float kNeutral = -INFINITY;
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Combines the values of kWidth adjacent lanes. kWidth is a power of two. All lanes of the warp
// must call this function.
template <int kWidth = kWarp, typename Combine>
__device__ inline float across_warp(float value, Combine combine) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

// Combines the values of all threads in the block, and returns the result to each of them. `room`
// has space for one float per warp. The caller can reuse `room` as soon as the function returns.
template <typename Combine>
__device__ inline float across_block(float value, Combine combine, float* room) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  value = across_warp(value, combine);
  if (lane == 0) room[warp] = value;
  __syncthreads();
  value = lane < warps ? room[lane] : Combine::kNeutral;
  value = across_warp(value, combine);
  __syncthreads();
  return value;
}

// Calls `body` with the smallest number in the list that is at least `wanted`, as a constant.
// Returns false if there is no such number.
template <int kFirst, int... kMore, typename Body>
bool by_count(int64_t wanted, Body body) {
  if (wanted <= kFirst) {
    body(std::integral_constant<int, kFirst>{});
    return true;
  }
  if constexpr (sizeof...(kMore) > 0) return by_count<kMore...>(wanted, body);
  return false;
}

// Calls `body` with a value of the C++ type that corresponds to `type`.
template <typename Body>
int by_type(Type type, Body body) {
  switch (type) {
    case Type::kFloat:
      return body(float{});
    case Type::kHalf:
      return body(__half{});
    case Type::kBFloat16:
      return body(__nv_bfloat16{});
  }
  return cudaErrorInvalidValue;
}

constexpr int64_t divide_up(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace cuda_ops::cuda
