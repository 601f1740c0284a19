// The extension's QPU kernels and the shared memory that they use. Independent of torch and of
// QPULib, whose macros are used only in kernels.cpp.
#ifndef QPU_OPS_KERNELS_H
#define QPU_OPS_KERNELS_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace qpu_ops {

// The number of elements in a QPU vector, the unit in which kernels read and store.
constexpr std::size_t block = 16;

constexpr std::size_t padded(std::size_t n) { return (n + block - 1) / block * block; }

enum class Elementwise { product, add };

// Shared memory of an elementwise kernel: `n` floats each, n a multiple of 16.
struct Vectors {
  float* a;
  float* b;
  const float* result;
};

// Shared memory of the matrix kernel: a has `rows` rows of `columns` floats
// (a multiple of 16), b one such row, sums 16 partial sums per row.
struct Matrix {
  float* a;
  float* b;
  const float* sums;
};

struct Device;

// Exclusive access to the QPUs: only one thread of the process has a Session at a time.
// Buffers grow on demand and are reused by later calls; those that would make the total
// exceed the limit are released. Kernels are compiled at first use and cached. After fork() the
// child starts without buffers and kernels, because it inherits memory that the parent's QPUs write
// to.
class Session {
 public:
  // `limit` is the maximum number of floats in all buffers; a call must need less.
  explicit Session(std::int64_t limit);

  // The memory stays valid until the Session ends. Throws qpu::AllocationError.
  Vectors vectors(std::size_t n);
  Matrix matrix(std::size_t rows, std::size_t columns);
  // Arrays of the given numbers of floats.
  Vectors operands(std::size_t a, std::size_t b, std::size_t result);

  // Whether b still holds what the caller with this tag wrote. A result of true is valid
  // only after matrix() was called with the same column count.
  bool has_vector(std::uint64_t tag) const;
  void set_vector_tag(std::uint64_t tag);

  // Runs a kernel on the memory that vectors(n) or matrix(rows, columns) returned. Returns
  // the time from the launch to its end, in seconds. Throws qpu::Error.
  double run(Elementwise operation, std::size_t n, int qpus);
  double run_matrix(std::size_t rows, std::size_t columns, int qpus);
  // The product of a (m x k) and b (k x n), both dense, by libqpu's own kernel.
  double run_product(int m, int n, int k, int qpus) const;

 private:
  void make_room(std::size_t a, std::size_t b, std::size_t result);

  std::lock_guard<std::mutex> lock_;
  Device& device_;
  std::size_t limit_;
};

// Must be called once, before the first Session. Otherwise, a fork() during that Session could
// leave the child with a lock that is never released. Throws std::system_error.
void install_fork_handlers();

// A unique tag for Session::set_vector_tag.
std::uint64_t new_tag();

// How often each kernel was compiled in this process.
std::map<std::string, int> compilations();

// Number of floats in the buffers now.
std::size_t buffered();

// Releases the buffers; the next call allocates new ones.
void release_buffers();

// The backend that runs the kernels ("interpreter", ...) and libqpu's reason for selecting it.
struct Backend {
  std::string name;
  std::string reason;
};
Backend backend();

}  // namespace qpu_ops

#endif
