// All operators as plain loops, with sums in double precision. These loops are the implementation
// for CPU tensors, and the reference for the results of the GPU.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"

namespace cuda_ops::cpu {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

template <typename Body>
void by_type(Type type, Body body) {
  switch (type) {
    case Type::kFloat:
      return body(float{});
    case Type::kHalf:
      return body(Half{});
    case Type::kBFloat16:
      return body(BFloat16{});
  }
}

float apply(const Elementwise& work, float a, float b) {
  switch (work.function) {
    case Function::kAdd:
      return a + b;
    case Function::kExp:
      return std::exp(a);
    case Function::kAxpy:
      return std::fma(work.alpha, a, b);
  }
  return std::numeric_limits<float>::quiet_NaN();
}

template <typename T>
void elementwise(const Elementwise& work) {
  std::array<int64_t, Elementwise::kOperands> offsets{};
  std::array<int64_t, kMaxDims> position{};
  for (int64_t done = 0; done < work.count; ++done) {
    const auto a = static_cast<float>(static_cast<const T*>(work.in[0])[offsets[1]]);
    const auto b = work.inputs == 2 ? static_cast<float>(static_cast<const T*>(work.in[1])[offsets[2]]) : 0.0F;
    static_cast<T*>(work.out)[offsets[0]] = static_cast<T>(apply(work, a, b));
    for (int d = work.dims - 1; d >= 0; --d) {
      const bool wraps = ++position[d] == work.sizes[d];
      for (int operand = 0; operand < Elementwise::kOperands; ++operand)
        offsets[operand] += work.strides[operand][d] * (wraps ? 1 - work.sizes[d] : 1);
      if (!wraps) break;
      position[d] = 0;
    }
  }
}

template <typename T>
void softmax_row(const T* in, T* out, int64_t columns) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < columns; ++i) largest = std::max(largest, static_cast<float>(in[i]));
  const auto part = [&](int64_t i) { return std::exp(static_cast<double>(static_cast<float>(in[i])) - largest); };
  double total = 0.0;
  for (int64_t i = 0; i < columns; ++i) total += part(i);
  for (int64_t i = 0; i < columns; ++i) out[i] = static_cast<T>(static_cast<float>(part(i) / total));
}

template <typename T>
float dot(const Matvec& work, int64_t row) {
  const T* at = static_cast<const T*>(work.matrix) + row * work.row_stride;
  const T* vector = static_cast<const T*>(work.vector);
  double sum = 0.0;
  for (int64_t i = 0; i < work.columns; ++i)
    sum += static_cast<double>(static_cast<float>(at[i * work.column_stride])) * static_cast<float>(vector[i]);
  return static_cast<float>(sum);
}

}  // namespace

void run(const Elementwise& work) {
  by_type(work.type, [&](auto zero) { elementwise<decltype(zero)>(work); });
}

void run(const Softmax& work) {
  by_type(work.type, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t row = 0; row < work.rows; ++row)
      softmax_row(static_cast<const T*>(work.in) + row * work.row_stride, static_cast<T*>(work.out) + row * work.columns,
                  work.columns);
  });
}

void run(const Matvec& work) {
  by_type(work.type, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t row = 0; row < work.rows; ++row)
      static_cast<T*>(work.out)[row] = static_cast<T>(dot<T>(work, row));
  });
}

}  // namespace cuda_ops::cpu
