// C++ kernels that use libqpu, for the loader: define PITORCH_KERNEL(arrays) { ... } in one file.
//
//   PITORCH_KERNEL(arrays) {
//     static auto kernel = compile(add_one);
//     kernel(arrays.size(0), qpu::BusPointer<float>(arrays.floats(0)), qpu::BusPointer<float>(arrays.floats(1)));
//     return kernel.cycles().seconds();
//   }
//
// The block returns the time in seconds according to the emulator's model of a board, or NO_MODEL.
// To measure several kernels, or kernels in libqpu's library, use a ModelClock. Exceptions are
// reported to the client that requested the run.
#ifndef PITORCH_KERNEL_HPP
#define PITORCH_KERNEL_HPP

#include <exception>
#include <map>
#include <stdexcept>
#include <string>

#include <qpu.h>

#include "kernel.h"

namespace pitorch {

constexpr double NO_MODEL = -1;

// Measures the time of all later emulator runs in this thread, according to the emulator's model of a board.
class ModelClock {
 public:
  ModelClock() : began_(now()) {}

  // NO_MODEL if nothing was run, or if a run did not use the emulator.
  double seconds() const {
    const double passed = now() - began_;
    return passed > 0 ? passed : NO_MODEL;
  }

 private:
  static double now() {
    qpu_cycles all;
    return qpu_thread_cycles(&all) == 0 ? all.seconds : 0;
  }

  double began_;
};

class Arrays {
 public:
  Arrays(const pitorch_array *first, int count) : first_(first), count_(count) {}

  int count() const { return count_; }
  // The number of elements along one dimension, or in total.
  int dimension(int array, int axis) const {
    const pitorch_array &found = at(array);
    if (axis < 0 || axis >= found.dimensions) throw std::out_of_range("the array has no such dimension");
    return static_cast<int>(found.shape[axis]);
  }
  int size(int array) const {
    int product = 1;
    for (int axis = 0; axis < at(array).dimensions; axis++) product *= dimension(array, axis);
    return product;
  }
  float *floats(int array) const {
    if (at(array).kind != 'f' || at(array).bytes != 4)
      throw std::invalid_argument("QPUs compute with float32 only: expected a float32 array");
    return static_cast<float *>(at(array).data);
  }

 private:
  const pitorch_array &at(int array) const {
    if (array < 0 || array >= count_)
      throw std::out_of_range("the kernel has only " + std::to_string(count_) + " arrays");
    return first_[array];
  }

  const pitorch_array *first_;
  int count_;
};

namespace detail {

inline std::string &lastError() {
  static std::string text;
  return text;
}

inline double &modelSeconds() {
  static double seconds = NO_MODEL;
  return seconds;
}

inline std::map<void *, qpu_buffer *> &buffers() {
  static std::map<void *, qpu_buffer *> made;
  return made;
}

}  // namespace detail
}  // namespace pitorch

#define PITORCH_KERNEL(arrays)                                                          \
  static double pitorchRun(const pitorch::Arrays &arrays);                              \
  extern "C" void *pitorch_kernel_allocate(size_t bytes) {                              \
    /* rounded up, because kernels may access the whole last vector */                  \
    qpu_buffer *buffer = qpu_buffer_new((bytes + 63) / 64 * 64);                        \
    if (buffer == nullptr) {                                                            \
      pitorch::detail::lastError() = qpu_last_error();                                  \
      return nullptr;                                                                   \
    }                                                                                   \
    void *memory = qpu_buffer_data(buffer);                                             \
    pitorch::detail::buffers()[memory] = buffer;                                        \
    return memory;                                                                      \
  }                                                                                     \
  extern "C" void pitorch_kernel_release(void *memory) {                                \
    qpu_buffer_delete(pitorch::detail::buffers()[memory]);                              \
    pitorch::detail::buffers().erase(memory);                                           \
  }                                                                                     \
  extern "C" int pitorch_kernel_run(const pitorch_array *first, int32_t count) {        \
    try {                                                                               \
      pitorch::detail::modelSeconds() = pitorchRun(pitorch::Arrays(first, count));      \
      return 0;                                                                         \
    } catch (const std::exception &fault) {                                             \
      pitorch::detail::lastError() = fault.what();                                      \
      return -1;                                                                        \
    }                                                                                   \
  }                                                                                     \
  extern "C" const char *pitorch_kernel_error(void) {                                   \
    return pitorch::detail::lastError().c_str();                                        \
  }                                                                                     \
  extern "C" const char *pitorch_kernel_backend(void) {                                 \
    static std::string text;                                                            \
    const char *name = qpu_backend_name();                                              \
    text = std::string("libqpu ") + qpu_version() + ", " + (name != nullptr ? name : "no backend") + ": " + \
           qpu_backend_reason();                                                        \
    return text.c_str();                                                                \
  }                                                                                     \
  extern "C" double pitorch_kernel_model_seconds(void) {                                \
    return pitorch::detail::modelSeconds();                                             \
  }                                                                                     \
  static double pitorchRun(const pitorch::Arrays &arrays)

#endif
