// Helpers of the tests: one-vector kernels and bit patterns.
#ifndef TESTS_RUN_HPP
#define TESTS_RUN_HPP

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "QPULib.h"

namespace test {

using Ints = std::array<int, 16>;

inline std::uint32_t bitsOf(float f) {
  std::uint32_t b = 0;
  std::memcpy(&b, &f, sizeof b);
  return b;
}
inline float floatOf(std::uint32_t b) {
  float f = 0;
  std::memcpy(&f, &b, sizeof f);
  return f;
}

// The 16 integers that `f` computes from 0..15.
template <typename F>
Ints ints(F f) {
  SharedArray<int> out(16);
  compile([f](Ptr<Int> p) {
    Int x = index();
    *p = f(x);
  })(&out);
  Ints result{};
  out.copyTo(result.data(), 16);
  return result;
}

// Compiled code on the emulator stops where the hardware would go wrong, and says so
// in words of its own.
inline bool onEmulator() { return std::strcmp(qpu::backend().name, "emulator") == 0; }

// `f` of two vectors whose elements are all a and b, element 0 of the result,
// as bits. Runs through shared memory so that nothing is folded.
template <typename F>
std::uint32_t floatBits(std::uint32_t a, std::uint32_t b, F f) {
  SharedArray<float> x(16), y(16), r(16);
  for (int i = 0; i < 16; ++i) {
    std::memcpy(x.data() + i, &a, 4);
    std::memcpy(y.data() + i, &b, 4);
  }
  compile([f](Ptr<Float> p, Ptr<Float> q, Ptr<Float> out) {
    Float u = *p;
    Float v = *q;
    *out = f(u, v);
  })(&x, &y, &r);
  std::uint32_t bits = 0;
  std::memcpy(&bits, r.data(), 4);
  return bits;
}

// The text of the exception of kind E that `f` throws.
template <typename E, typename F>
std::string thrown(F f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    FAIL("another exception: " << e.what());
  }
  FAIL("no exception");
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace test

#endif
