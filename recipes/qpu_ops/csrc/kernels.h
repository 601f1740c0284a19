// The extension's QPU kernels and the shared memory that they use. This file does not depend on
// torch or on QPULib. Only kernels.cpp uses QPULib's macros.
#ifndef QPU_OPS_KERNELS_H
#define QPU_OPS_KERNELS_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace qpu_ops {

// The number of elements in a QPU vector. Kernels read and store whole vectors.
constexpr std::size_t block = 16;

constexpr std::size_t padded(std::size_t n) { return (n + block - 1) / block * block; }

enum class Elementwise { product, add };

// The shared memory of an elementwise kernel. Each array has n floats, and n is a multiple of 16.
struct Vectors {
  float* a;
  float* b;
  const float* result;
};

// The shared memory of the matrix kernel. `a` has `rows` rows of `columns` floats, where
// `columns` is a multiple of 16. `b` has one such row. `sums` has 16 partial sums per row.
struct Matrix {
  float* a;
  float* b;
  const float* sums;
};

struct Device;

// Exclusive access to the QPUs. Only one thread of the process has a Session at a time. Buffers
// grow on demand, and later calls reuse them. Buffers that would make the total size exceed the
// limit are released. Kernels are compiled when they are first used, and are then cached. After
// fork(), the child starts without buffers and kernels, because the QPUs of the parent write to
// the memory that the child inherits.
class Session {
 public:
  // `limit` is the maximum number of floats in all buffers together. A call must not require more
  // floats than this limit.
  explicit Session(std::int64_t limit);

  // The memory is valid until the Session ends. Both functions throw qpu::AllocationError.
  Vectors vectors(std::size_t n);
  Matrix matrix(std::size_t rows, std::size_t columns);
  // Returns arrays with the given numbers of floats.
  Vectors operands(std::size_t a, std::size_t b, std::size_t result);

  // Returns true if b still contains the data that the caller with this tag wrote. Call matrix()
  // with the same number of columns first. Otherwise, a result of true is meaningless.
  bool has_vector(std::uint64_t tag) const;
  void set_vector_tag(std::uint64_t tag);

  // Runs a kernel on the memory that vectors(n) or matrix(rows, columns) returned. Returns the
  // time in seconds from the start of the launch to its end. Throws qpu::Error.
  double run(Elementwise operation, std::size_t n, int qpus);
  double run_matrix(std::size_t rows, std::size_t columns, int qpus);
  // Computes the product of a (m x k) and b (k x n) with libqpu's own kernel. Both matrices must be
  // dense.
  double run_product(int m, int n, int k, int qpus) const;

 private:
  void make_room(std::size_t a, std::size_t b, std::size_t result);

  std::lock_guard<std::mutex> lock_;
  Device& device_;
  std::size_t limit_;
};

// This function must be called once, before the first Session. Otherwise, after a fork() during a
// Session, the child could inherit a lock that is never released. Throws std::system_error.
void install_fork_handlers();

// Returns a unique tag for Session::set_vector_tag().
std::uint64_t new_tag();

// Returns how often each kernel was compiled in this process.
std::map<std::string, int> compilations();

// Returns the number of floats for which the buffers currently have room.
std::size_t buffered();

// Releases the buffers. The next call allocates new buffers.
void release_buffers();

// The backend that runs the kernels, such as "interpreter", and the reason why libqpu selected
// it.
struct Backend {
  std::string name;
  std::string reason;
};
Backend backend();

}  // namespace qpu_ops

#endif
