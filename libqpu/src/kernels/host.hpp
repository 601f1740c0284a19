// What the kernels' host sides share: checks, scratch memory, the call itself.
#ifndef QPU_SRC_KERNELS_HOST_HPP
#define QPU_SRC_KERNELS_HOST_HPP

#include <cstdint>
#include <memory>
#include <string>

#include "qpu/kernel.h"
#include "qpu/kernels.h"

namespace qpu::kernels {

// `what` in the error of kernel `name`.
[[noreturn]] void refuse(const char* name, const std::string& what);

// Whether kernels run on QPUs of this machine, which reach GPU memory only.
bool onHardware();

// Sizes that are below `least` are refused.
void requireSize(const char* name, const char* what, std::int64_t value, std::int64_t least = 0);
// Indices and strides that kernels multiply have 24 bits.
void requireFactor(const char* name, const char* what, std::int64_t value);
// Throws ArgumentError unless one live array holds the `count` words from `at` on.
void requireRange(const char* name, const char* what, Floats at, std::int64_t count);
// The same for m x n elements of a matrix.
void requireMatrix(const char* name, const char* what, const Matrix& matrix, int m, int n);

constexpr int kMostQpus = 12;

// Each call has its own copy of the kernel, as the QPU count is the copy's.
template <typename K, typename... A>
void run(K kernel, int qpus, A... arguments) {
  kernel.setNumQPUs(qpus == 0 ? kMostQpus : qpus);
  kernel(arguments...);
}

// Words of shared memory for the time of a call; kept for later ones.
class Scratch {
 public:
  explicit Scratch(std::size_t words);
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  Floats floats(std::size_t first = 0) const;
  BusPointer<int> ints(std::size_t first = 0) const;
  // For the CPU.
  const float* readFloats() const;
  int* hostInts() const;

 private:
  std::unique_ptr<SharedArray<float>> array_;
};

}  // namespace qpu::kernels

#endif
