// The QPU kernels of the extension and the shared memory they work in. Nothing
// of torch here and nothing of QPULib: its macros stay in kernels.cpp.
#ifndef QPU_OPS_KERNELS_H
#define QPU_OPS_KERNELS_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace qpu_ops {

// Elements of a QPU vector: what a kernel reads and stores at a time.
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

// The only way to the QPUs: one thread of the process at a time has a Session.
// Buffers grow when a larger one is asked for and are kept for the next call,
// but for those that would take all together beyond the limit: they are given
// back. Kernels are compiled at first use and kept. After fork() the child starts
// with neither: what it inherits is memory that the parent's QPUs write to.
class Session {
 public:
  // `limit` is how many floats all buffers may hold; a call asks for less.
  explicit Session(std::int64_t limit);

  // What the returned pointers hold is kept until the Session ends. Throws
  // qpu::AllocationError.
  Vectors vectors(std::size_t n);
  Matrix matrix(std::size_t rows, std::size_t columns);
  // Of that many floats each.
  Vectors operands(std::size_t a, std::size_t b, std::size_t result);

  // Whether b still holds what the caller with this tag put there. True is to
  // be believed only after matrix() was called for the same column count.
  bool vector_is(std::uint64_t tag) const;
  void vector_becomes(std::uint64_t tag);

  // Run a kernel on what vectors(n) or matrix(rows, columns) returned. The
  // result is the time from the launch to its end, in seconds. Throws
  // qpu::Error.
  double run(Elementwise operation, std::size_t n, int qpus);
  double run_matrix(std::size_t rows, std::size_t columns, int qpus);
  // The product of a (m x k) and b (k x n), without gaps, by libqpu's own kernel.
  double run_product(int m, int n, int k, int qpus) const;

 private:
  void make_room(std::size_t a, std::size_t b, std::size_t result);

  std::lock_guard<std::mutex> lock_;
  Device& device_;
  std::size_t limit_;
};

// To be called once, before there is a Session: a fork() during the very first
// one must not leave the child with a lock that nobody holds. Throws
// std::system_error.
void install_fork_handlers();

// Tag for Session::vector_becomes, never given twice.
std::uint64_t new_tag();

// How often each kernel was compiled in this process.
std::map<std::string, int> compilations();

// Floats that the buffers hold now.
std::size_t buffered();

// Give the buffers back; the next call allocates anew.
void release_buffers();

// Which backend runs the kernels ("interpreter", ...) and why, as libqpu says.
struct Backend {
  std::string name;
  std::string reason;
};
Backend backend();

}  // namespace qpu_ops

#endif
