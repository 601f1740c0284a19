// Parts that the kernels share: tables in shared memory, and loops over rows. This file does not
// depend on torch. Include it after the headers of other libraries, because of QPULib's macros.
#ifndef TORCH_QPU_KERNEL_PARTS_H
#define TORCH_QPU_KERNEL_PARTS_H

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include <QPULib.h>
#include <qpu/stream.h>

#include "memory.h"

namespace torch_qpu::learning {

using qpu::kernels::burst;
using qpu::kernels::finishBursts;
using qpu::kernels::firstVpmRow;
using qpu::kernels::kInFlight;
using qpu::kernels::kShort;
using qpu::kernels::overPlanes;
using qpu::kernels::Pointers;
using qpu::kernels::Sum;
using qpu::kernels::Vectors;
using qpu::kernels::walk;

// Data that the CPU prepares for a kernel. The data is in shared memory during the call.
template <typename T>
class Table {
 public:
  explicit Table(std::size_t count)
      : data_(static_cast<T*>(allocate(std::max<std::size_t>(count, 1) * sizeof(T)))) {
    static_assert(sizeof(T) == 4 && std::is_trivial_v<T>);
  }
  explicit Table(const std::vector<T>& from) : Table(from.size()) {
    copy_words(data_, from.data(), from.size() * sizeof(T));
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  ~Table() { release(data_); }

  T* data() const { return data_; }
  qpu::BusPointer<T> place() const { return data_; }

 private:
  T* data_;
};

// Converts a pointer to the type that kernels take both for reading and for writing.
inline qpu::BusPointer<float> at(const float* p) { return const_cast<float*>(p); }
// Returns the words of 64-bit numbers. The low word of each number comes first.
inline qpu::BusPointer<int> words(const std::int64_t* p) {
  return static_cast<int*>(static_cast<void*>(const_cast<std::int64_t*>(p)));
}
inline qpu::BusPointer<float> float_words(const std::int64_t* p) {
  return static_cast<float*>(static_cast<void*>(const_cast<std::int64_t*>(p)));
}
inline std::int32_t low_word(std::int64_t x) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(x));
}
inline std::int32_t high_word(std::int64_t x) { return static_cast<std::int32_t>(x >> 32); }

constexpr int kMaxQpus = 12;
inline int all_if_0(int qpus) { return qpus == 0 ? kMaxQpus : qpus; }

// The kernel is passed by value, so that setting its QPU count does not change the cached copy.
template <typename K, typename... A>
void run(K kernel, int qpus, A... arguments) {
  kernel.setNumQPUs(all_if_0(qpus));
  kernel(arguments...);
}

// Reads a vector. Requests are issued in pairs.
template <typename T>
void read(T& x, const PtrExpr<T>& from) {
  T unused;
  gather(from);
  gather(from);
  receive(x);
  receive(unused);
}

// Stores value(x) for each vector in a row. The output may be one of the inputs.
template <std::size_t N, typename Value>
void store_row(const Int& columns, const Pointers<N>& from, const PtrExpr<Float>& to,
               const Int& vpm_row, Value value) {
  std::array<Float, kShort> result;
  walk<N, kShort>(
      columns, from, 0, 1,
      [&](int j, Vectors<N>& x) { result[static_cast<std::size_t>(j)] = value(x); },
      [&](const IntExpr& first) { burst(result, to + first, vpm_row); },
      [&](Vectors<N>& x, const Int& first, const Int& count) {
        finishBursts();
        store(value(x), to + first, count);
      });
  finishBursts();
}

// Returns the sum of term(x) over a row, broadcast to all elements.
template <std::size_t N, typename Term>
FloatExpr sum_of_row(const Int& columns, const Pointers<N>& from, Term term) {
  Sum sum;
  walk<N, kShort>(
      columns, from, 0, 1, [&](int /*place*/, Vectors<N>& x) { sum.add(term(x)); },
      [](const IntExpr& /*first*/) {},
      [&](Vectors<N>& x, const Int& /*first*/, const Int& count) {
        sum.add(qpu::select(index() < count, term(x), 0));
      });
  return qpu::sumOf(sum.total - sum.lost);
}

}  // namespace torch_qpu::learning

#endif
