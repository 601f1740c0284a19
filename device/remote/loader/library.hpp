// The interface through which the loader runs a kernel and allocates its memory.
#ifndef PITORCH_LIBRARY_HPP
#define PITORCH_LIBRARY_HPP

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel.h"

constexpr std::size_t ALIGNMENT = 64;  // TVM's code relies on this alignment

// An error on the board. The kinds of errors are listed in loader.cpp.
struct Failure : std::runtime_error {
  Failure(const char *what, const std::string &text) : std::runtime_error(text), kind(what) {}
  const char *kind;
};

class Library {
 public:
  Library() = default;
  Library(const Library &) = delete;
  Library &operator=(const Library &) = delete;
  Library(Library &&) = delete;
  Library &operator=(Library &&) = delete;
  virtual ~Library() = default;

  virtual void *allocate(std::size_t bytes) = 0;
  virtual void release(void *memory) = 0;
  virtual void run(const std::vector<pitorch_array> &arrays) = 0;
  virtual std::string backend() = 0;
  virtual double modelSeconds() = 0;

  // The total time of `number` runs in seconds.
  virtual double time(const std::vector<pitorch_array> &arrays, std::uint64_t number) {
    const auto began = std::chrono::steady_clock::now();
    for (std::uint64_t i = 0; i < number; i++) run(arrays);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }
};

#endif
