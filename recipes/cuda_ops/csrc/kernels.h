// The kernels behind the operators, without torch: what to compute, on which memory, on which stream.
//
// All counts, sizes and strides are of elements and 64 bits wide. Nothing here allocates memory or waits for the GPU.
#pragma once

#include <array>
#include <cstdint>

namespace cuda_ops {

// Tensors may have this many dimensions once neighbouring ones that lie behind each other in memory are merged.
constexpr int kMaxDims = 12;

enum class Type { kFloat, kHalf, kBFloat16 };
enum class Function { kAdd, kExp, kAxpy };

constexpr int size_of(Type type) { return type == Type::kFloat ? 4 : 2; }

// out[i] = f(in[0][i], in[1][i]), for all i below `count`. Operand 0 of `strides` is the output.
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

  // One run of neighbours in memory, for every operand.
  [[nodiscard]] bool dense() const {
    if (dims == 0) return true;
    for (int operand = 0; operand <= inputs; ++operand)
      if (strides[operand][0] != 1) return false;
    return dims == 1;
  }
};

// Each row of `columns` neighbours becomes exp(x - max) / sum. Rows of the output lie behind each other.
struct Softmax {
  Type type = Type::kFloat;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  const void* in = nullptr;
  void* out = nullptr;
};

// out = matrix · vector. Either stride of the matrix may be anything; the vector and the output are dense.
struct Matvec {
  Type type = Type::kFloat;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 1;
  const void* matrix = nullptr;
  const void* vector = nullptr;
  void* out = nullptr;
  // Room for splits * rows sums of parts, where `splits_of` says that columns are shared out among blocks.
  float* partial = nullptr;
  int splits = 1;
};

// Each returns a cudaError_t, 0 for success; `stream` is a cudaStream_t.
namespace cuda {
int run(const Elementwise& work, void* stream);
int run(const Softmax& work, void* stream);
int run(const Matvec& work, void* stream);
// Into how many parts the columns are cut, so that all of the GPU has work.
int splits_of(const Matvec& work);
const char* explain(int error);
// The calling thread's, or -1.
int current_device();
}  // namespace cuda

// The same by plain loops: the reference, and what runs for tensors in the CPU's memory.
namespace cpu {
void run(const Elementwise& work);
void run(const Softmax& work);
void run(const Matvec& work);
}  // namespace cpu

}  // namespace cuda_ops
