#include "kernels.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <system_error>

#include <QPULib.h>
#include <qpu/backend.h>
#include <qpu/kernels.h>

namespace qpu_ops {
namespace {

// Receives the two surplus vectors. libqpu's interpreter accepts a request outside all buffers if
// its vector is not used, but on hardware such a request may cause a hang. The comparison uses
// the vectors, so that the interpreter reports such a request.
void drain(Float& x, Float& y) {
  receive(x);
  receive(y);
  If (any(x != y))
  End
}

// Blocks of 16 elements are distributed round-robin among n QPUs: QPU q computes blocks q, q + n, q
// + 2n and so on. While a QPU computes a block, it fetches its next block. At most four requests
// are outstanding, two for this block and two for the next block. A TMU queue can hold four
// requests. After its last block, a QPU requests the last block of the array again. All iterations
// are then the same, and all requests stay inside the buffers. The two surplus vectors are received
// at the end. A QPU without blocks issues only these surplus requests and receives their vectors.
template <typename Combine>
void elementwise(const Int& blocks, const Ptr<Float>& a, const Ptr<Float>& b,
                 const Ptr<Float>& result, Combine combine) {
  const Int last = blocks - 1;
  Ptr<Float> lane_a = a + index();
  Ptr<Float> lane_b = b + index();
  Int ahead = min(me(), last) << 4;
  gather(lane_a + ahead);
  gather(lane_b + ahead);
  Float x;
  Float y;
  For (Int current = me(), current < blocks, current = current + numQPUs())
    ahead = min(current + numQPUs(), last) << 4;
    gather(lane_a + ahead);
    gather(lane_b + ahead);
    receive(x);
    receive(y);
    store(combine(x, y), result + (current << 4));
  End
  drain(x, y);
}

void product_kernel(Int blocks, Ptr<Float> a, Ptr<Float> b, Ptr<Float> result) {
  elementwise(blocks, a, b, result, [](const Float& x, const Float& y) { return x * y; });
}

void add_kernel(Int blocks, Ptr<Float> a, Ptr<Float> b, Ptr<Float> result) {
  elementwise(blocks, a, b, result, [](const Float& x, const Float& y) { return x + y; });
}

// Rows are distributed round-robin among the QPUs. Element e of a row's sums is
//   ((a[e] b[e] + a[e+16] b[e+16]) + a[e+32] b[e+32]) + ...,
// which is computed from left to right. The request pipeline continues from the last block of a
// row to the first block of the QPU's next row. After its last row, the QPU requests the last row
// of the matrix.
void matrix_vector_kernel(Int rows, Int row_blocks, Ptr<Float> a, Ptr<Float> b, Ptr<Float> sums) {
  const Int last = rows - 1;
  const Int row_length = row_blocks << 4;
  Ptr<Float> lane_a = a + index();
  Ptr<Float> lane_b = b + index();
  Ptr<Float> p = lane_a + min(me(), last) * row_length;
  Ptr<Float> q = lane_b;
  gather(p);
  gather(q);
  Float x;
  Float y;
  For (Int row = me(), row < rows, row = row + numQPUs())
    Float sum = 0;
    For (Int left = row_blocks - 1, left > 0, left = left - 1)
      p = p + 16;
      q = q + 16;
      gather(p);
      gather(q);
      receive(x);
      receive(y);
      sum = sum + x * y;
    End
    p = lane_a + min(row + numQPUs(), last) * row_length;
    q = lane_b;
    gather(p);
    gather(q);
    receive(x);
    receive(y);
    store(sum + x * y, sums + (row << 4));
  End
  drain(x, y);
}

class Buffer {
 public:
  float* at_least(std::size_t n) {
    if (n > size_) {
      array_.reset();
      size_ = 0;
      // Allocate exactly n floats, so that the interpreter detects an access one word past the
      // end.
      array_ = std::make_unique<SharedArray<float>>(n);
      size_ = n;
    }
    return array_->data();
  }
  SharedArray<float>* get() const { return array_.get(); }
  std::size_t size() const { return size_; }
  void release() {
    array_.reset();
    size_ = 0;
  }

 private:
  std::unique_ptr<SharedArray<float>> array_;
  std::size_t size_ = 0;
};

// A kernel that is compiled when it is first called.
template <typename... Ts>
class Lazy {
 public:
  Lazy(const char* name, void (*source)(Ts...)) : name_(name), source_(source) {}

  Kernel<Ts...>& get() {
    if (!kernel_) {
      kernel_.reset(new Kernel<Ts...>(compile(source_, name_)));
      ++compilations_;
    }
    return *kernel_;
  }
  int compilations() const { return compilations_; }

 private:
  const char* name_;  // appears in libqpu's error messages
  void (*source_)(Ts...);
  std::unique_ptr<Kernel<Ts...>> kernel_;
  int compilations_ = 0;
};

}  // namespace

// The kernels and buffers of this process.
struct Device {
  Lazy<Int, Ptr<Float>, Ptr<Float>, Ptr<Float>> product{"product", product_kernel};
  Lazy<Int, Ptr<Float>, Ptr<Float>, Ptr<Float>> add{"add", add_kernel};
  Lazy<Int, Int, Ptr<Float>, Ptr<Float>, Ptr<Float>> matrix_vector{"matrix_vector",
                                                                   matrix_vector_kernel};
  Buffer a;
  Buffer b;
  Buffer result;
  std::uint64_t vector_tag = 0;
};

namespace {

std::mutex guard;
Device* state = nullptr;

void before_fork() { guard.lock(); }
void after_fork_in_parent() { guard.unlock(); }
void after_fork_in_child() {
  // The object is not deleted, because its destructor would release the parent's buffers in the
  // firmware.
  state = nullptr;
  guard.unlock();
}

// The caller must hold the lock.
Device& device() {
  if (state == nullptr) state = new Device;
  return *state;
}

template <typename Launch>
double seconds_of(Launch launch) {
  const auto began = std::chrono::steady_clock::now();
  launch();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

void install_fork_handlers() {
  const int fault = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  if (fault != 0) throw std::system_error(fault, std::generic_category(), "pthread_atfork");
}

Session::Session(std::int64_t limit)
    : lock_(guard), device_(device()), limit_(static_cast<std::size_t>(limit)) {}

// If all buffers together would exceed the limit, releases the buffers that earlier calls made
// larger than this call needs. If two parts of a call use the same vector, the second part does not
// need more memory than the first, so the vector is not released.
void Session::make_room(std::size_t a, std::size_t b, std::size_t result) {
  Device& d = device_;
  const auto then = [](const Buffer& buffer, std::size_t n) { return std::max(buffer.size(), n); };
  if (then(d.a, a) + then(d.b, b) + then(d.result, result) <= limit_) return;
  if (d.a.size() > a) d.a.release();
  if (d.b.size() > b) d.b.release();
  if (d.result.size() > result) d.result.release();
}

Vectors Session::vectors(std::size_t n) { return operands(n, n, n); }

Matrix Session::matrix(std::size_t rows, std::size_t columns) {
  const std::size_t a = rows * columns, sums = rows * block;
  make_room(a, columns, sums);
  if (device_.b.size() < columns) device_.vector_tag = 0;
  return {device_.a.at_least(a), device_.b.at_least(columns), device_.result.at_least(sums)};
}

Vectors Session::operands(std::size_t a, std::size_t b, std::size_t result) {
  device_.vector_tag = 0;
  make_room(a, b, result);
  return {device_.a.at_least(a), device_.b.at_least(b), device_.result.at_least(result)};
}

bool Session::has_vector(std::uint64_t tag) const { return device_.vector_tag == tag; }
void Session::set_vector_tag(std::uint64_t tag) { device_.vector_tag = tag; }

double Session::run(Elementwise operation, std::size_t n, int qpus) {
  auto& kernel = (operation == Elementwise::product ? device_.product : device_.add).get();
  kernel.setNumQPUs(qpus);
  return seconds_of([&] {
    kernel(static_cast<int>(n / block), device_.a.get(), device_.b.get(), device_.result.get());
  });
}

double Session::run_matrix(std::size_t rows, std::size_t columns, int qpus) {
  auto& kernel = device_.matrix_vector.get();
  kernel.setNumQPUs(qpus);
  return seconds_of([&] {
    kernel(static_cast<int>(rows), static_cast<int>(columns / block), device_.a.get(),
           device_.b.get(), device_.result.get());
  });
}

double Session::run_product(int m, int n, int k, int qpus) const {
  return seconds_of([&] {
    qpu::kernels::matmul({device_.result.get(), n}, {device_.a.get(), k}, {device_.b.get(), n}, m, n,
                         k, 1, 0, qpus);
  });
}

std::uint64_t new_tag() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

std::map<std::string, int> compilations() {
  const std::lock_guard<std::mutex> lock(guard);
  Device& d = device();
  return {{"product", d.product.compilations()},
          {"add", d.add.compilations()},
          {"matrix_vector", d.matrix_vector.compilations()}};
}

std::size_t buffered() {
  const std::lock_guard<std::mutex> lock(guard);
  Device& d = device();
  return d.a.size() + d.b.size() + d.result.size();
}

void release_buffers() {
  const std::lock_guard<std::mutex> lock(guard);
  Device& d = device();
  d.a.release();
  d.b.release();
  d.result.release();
  d.vector_tag = 0;
}

Backend backend() {
  const qpu::Backend found = qpu::backend();
  return {found.name, found.reason};
}

}  // namespace qpu_ops
