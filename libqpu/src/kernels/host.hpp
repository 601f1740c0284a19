// Host code that the kernels share: checks, scratch memory and calls.
#ifndef QPU_SRC_KERNELS_HOST_HPP
#define QPU_SRC_KERNELS_HOST_HPP

#include <cstdint>
#include <memory>
#include <string>

#include "qpu/kernel.h"
#include "qpu/kernels.h"

namespace qpu::kernels {

// Throws ArgumentError for kernel `name`, with a message that contains `what`.
[[noreturn]] void fail(const char* name, const std::string& what);

// Returns true if kernels run on this machine's QPUs, which can access only GPU memory.
bool onHardware();

// Throws ArgumentError if the value is less than `least`.
void requireSize(const char* name, const char* what, std::int64_t value, std::int64_t least = 0);
// Throws ArgumentError if the value has more than 24 bits, which is the limit for factors in
// kernels.
void requireFactor(const char* name, const char* what, std::int64_t value);
// Throws ArgumentError unless a live array contains the `count` words that start at `at`.
void requireRange(const char* name, const char* what, Floats at, std::int64_t count);
// Throws ArgumentError unless a live array contains the m x n elements of the matrix.
void requireMatrix(const char* name, const char* what, const Matrix& matrix, int m, int n);

constexpr int kMostQpus = 12;

// Each call uses its own copy of the kernel, because each copy has its own QPU count.
template <typename K, typename... A>
void run(K kernel, int qpus, A... arguments) {
  kernel.setNumQPUs(qpus == 0 ? kMostQpus : qpus);
  kernel(arguments...);
}

// Shared memory that is reserved during a call. A pool keeps the memory for reuse by later calls.
class Scratch {
 public:
  explicit Scratch(std::size_t words);
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  Floats floats(std::size_t first = 0) const;
  BusPointer<int> ints(std::size_t first = 0) const;
  // Return the addresses at which the CPU accesses the memory.
  const float* readFloats() const;
  int* hostInts() const;

 private:
  std::unique_ptr<SharedArray<float>> array_;
};

}  // namespace qpu::kernels

#endif
