// The kernels of the operators. This file does not depend on torch. The arguments specify what to
// compute, in which memory and on which stream.
//
// Counts, sizes and strides are 64-bit integers, in units of elements. No function in this file
// allocates memory or waits for the GPU.
#pragma once

#include <array>
#include <cstdint>

namespace cuda_ops {

// The maximum number of dimensions after adjacent dimensions that are contiguous in memory have
// been merged.
constexpr int kMaxDims = 12;

enum class Type { kFloat, kHalf, kBFloat16 };
enum class Function { kAdd, kExp, kAxpy };

constexpr int size_of(Type type) { return type == Type::kFloat ? 4 : 2; }

// Computes out[i] = f(in[0][i], in[1][i]) for 0 <= i < `count`. Operand 0 of `strides` is the
// output.
struct Elementwise {
  static constexpr int kOperands = 3;

  Function function = Function::kAdd;
  Type type = Type::kFloat;
  float alpha = 1.0F;
  int inputs = 2;
  int64_t count = 0;
  int dims = 0;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<std::array<int64_t, kMaxDims>, kOperands> strides{};
  std::array<const void*, 2> in{};
  void* out = nullptr;

  // Returns true if the elements of every operand form one contiguous range.
  [[nodiscard]] bool dense() const {
    if (dims == 0) return true;
    for (int operand = 0; operand <= inputs; ++operand)
      if (strides[operand][0] != 1) return false;
    return dims == 1;
  }
};

// Computes exp(x - max) / sum for each row of `columns` contiguous elements. The rows of the
// output are contiguous.
struct Softmax {
  Type type = Type::kFloat;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  const void* in = nullptr;
  void* out = nullptr;
};

// Computes out = matrix · vector. The matrix may have any strides. The vector and the output are
// dense.
struct Matvec {
  Type type = Type::kFloat;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 1;
  const void* matrix = nullptr;
  const void* vector = nullptr;
  void* out = nullptr;
  // Memory for splits * rows partial sums. The memory is used if `splits_of` distributes the
  // columns among several blocks.
  float* partial = nullptr;
  int splits = 1;
};

// The functions that return int return a cudaError_t, which is 0 for success. `stream` is a
// cudaStream_t.
namespace cuda {
int run(const Elementwise& work, void* stream);
int run(const Softmax& work, void* stream);
int run(const Matvec& work, void* stream);
// Returns the number of parts into which the columns are divided, so that the whole GPU has work.
int splits_of(const Matvec& work);
const char* explain(int error);
// Returns the calling thread's current device, or -1.
int current_device();
}  // namespace cuda

// The same operations as plain loops. These loops are the reference, and the implementation for CPU
// tensors.
namespace cpu {
void run(const Elementwise& work);
void run(const Softmax& work);
void run(const Matvec& work);
}  // namespace cpu

}  // namespace cuda_ops
