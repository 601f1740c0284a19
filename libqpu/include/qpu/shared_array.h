// Arrays that the CPU and the QPUs share. QPUs access the arrays at 32-bit bus addresses on every
// host, including 64-bit hosts.
#ifndef QPU_SHARED_ARRAY_H
#define QPU_SHARED_ARRAY_H

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "qpu/detail/export.h"

namespace qpu {

template <typename T>
class SharedArray;

// Registers a function that releases arrays that the program keeps for reuse. If libqpu cannot
// allocate memory for an array or a kernel, it calls all registered functions and tries once more.
//
// The function is called on the thread that allocates the array or runs the kernel, possibly on
// several threads at once. It must not run kernels, throw exceptions, or lock a mutex that any
// thread may hold in such a call. The registration lasts until the process ends.
QPU_API void onAllocationFailure(void (*release)());

namespace detail {

struct Block;

// Owns an allocation of 4-byte words. Allocation and release are thread-safe. The CPU's address
// and the QPUs' address of the first word are multiples of 64.
class QPU_API SharedWords {
 public:
  SharedWords() noexcept : block_(nullptr), words_(nullptr), count_(0), address_(0) {}
  // Throws AllocationError if count is 0, or if no memory or bus addresses are left.
  explicit SharedWords(std::size_t count);
  SharedWords(const SharedWords&) = delete;
  SharedWords& operator=(const SharedWords&) = delete;
  SharedWords(SharedWords&& other) noexcept;
  SharedWords& operator=(SharedWords&& other) noexcept;
  ~SharedWords();

  std::uint32_t* words() const noexcept { return words_; }
  std::size_t count() const noexcept { return count_; }
  // The QPUs' address of the first word, or 0 if nothing is allocated.
  std::uint32_t address() const noexcept { return address_; }

  // Throws ArgumentError if [first, first + n) is not inside the array.
  void requireRange(std::size_t first, std::size_t n, const char* what) const {
    if (first > count_ || n > count_ - first) outOfRange(first, n, what);
  }

 private:
  void outOfRange(std::size_t first, std::size_t n, const char* what) const;

  const Block* block_;
  std::uint32_t* words_;
  std::size_t count_;
  std::uint32_t address_;
};

// Returns the bus address of a word in a live array. The argument is the word's host address, or
// the word's bus address cast to a pointer. Returns 0 for a null pointer. Throws ArgumentError for
// any other pointer.
QPU_API std::uint32_t busAddress(const void* host);
// Returns the host address of a word in a live array, or null if `bus` is 0. Throws ArgumentError
// for any other bus address.
QPU_API void* hostAddress(std::uint32_t bus);

QPU_API void copyWords(void* to, const void* from, std::size_t count) noexcept;

}  // namespace detail

// An element of a SharedArray<T*>: a 32-bit bus address that is used like a T*.
template <typename T>
class BusPointer {
 public:
  BusPointer() : address_(0) {}
  BusPointer(std::nullptr_t) : address_(0) {}
  BusPointer(T* host) : address_(detail::busAddress(host)) {}
  BusPointer(const SharedArray<T>& array) : address_(array.getAddress()) {}
  BusPointer(const SharedArray<T>* array) : address_(array->getAddress()) {}

  static BusPointer fromAddress(std::uint32_t bus) {
    BusPointer p;
    p.address_ = bus;
    return p;
  }

  std::uint32_t address() const { return address_; }
  operator T*() const { return static_cast<T*>(detail::hostAddress(address_)); }

 private:
  std::uint32_t address_;
};

namespace detail {

// The type that represents an element in shared memory.
template <typename T>
struct Stored {
  typedef T type;
};
template <typename T>
struct Stored<T*> {
  typedef BusPointer<T> type;
};

}  // namespace detail

// T is int, float, or a pointer to the element type of another SharedArray. Elements are
// initialised to zero. An array can be moved but not copied. An array must not be destroyed or
// moved while a kernel uses it.
template <typename T>
class SharedArray {
 public:
  typedef typename detail::Stored<T>::type value_type;
  static_assert(sizeof(value_type) == 4, "an element of a QPU vector must have 32 bits");
  static_assert(std::is_trivially_copy_constructible<value_type>::value,
                "an element in shared memory must be trivially copyable");

  SharedArray() = default;
  // Allocates n elements. Throws AllocationError if n is 0 or if the allocation fails.
  explicit SharedArray(std::size_t n) : words_(n) {}

  // Releases the previous contents, then allocates n elements.
  void alloc(std::size_t n) {
    dealloc();
    words_ = detail::SharedWords(n);
  }
  void dealloc() { words_ = detail::SharedWords(); }

  std::size_t size() const { return words_.count(); }
  // Returns the QPUs' address of the array, a multiple of 64.
  std::uint32_t getAddress() const { return words_.address(); }
  // Returns the array's address as seen by the CPU.
  value_type* getPointer() { return reinterpret_cast<value_type*>(words_.words()); }
  const value_type* getPointer() const {
    return reinterpret_cast<const value_type*>(words_.words());
  }
  value_type* data() { return getPointer(); }
  const value_type* data() const { return getPointer(); }
  value_type* begin() { return getPointer(); }
  value_type* end() { return getPointer() + size(); }
  const value_type* begin() const { return getPointer(); }
  const value_type* end() const { return getPointer() + size(); }

  // Returns a pointer to element i that can be stored in a SharedArray<T*>.
  BusPointer<T> pointer(std::size_t i) const {
    words_.requireRange(i, 1, "pointer");
    return BusPointer<T>::fromAddress(words_.address() + static_cast<std::uint32_t>(4 * i));
  }

  // Throws ArgumentError if i is outside the array.
  template <typename I>
  value_type& operator[](I i) {
    words_.requireRange(static_cast<std::size_t>(i), 1, "operator[]");
    return getPointer()[static_cast<std::size_t>(i)];
  }
  template <typename I>
  const value_type& operator[](I i) const {
    words_.requireRange(static_cast<std::size_t>(i), 1, "operator[]");
    return getPointer()[static_cast<std::size_t>(i)];
  }

  // Copy n elements to or from the array, starting at element `first`. Both functions throw
  // ArgumentError if the array does not contain all n elements.
  void copyFrom(const value_type* source, std::size_t n, std::size_t first = 0) {
    words_.requireRange(first, n, "copyFrom");
    detail::copyWords(words_.words() + first, source, n);
  }
  void copyTo(value_type* target, std::size_t n, std::size_t first = 0) const {
    words_.requireRange(first, n, "copyTo");
    detail::copyWords(target, words_.words() + first, n);
  }

 private:
  detail::SharedWords words_;
};

}  // namespace qpu

#endif
