// Helpers for tests: kernels that compute one vector, and bit patterns.
#ifndef TESTS_RUN_HPP
#define TESTS_RUN_HPP

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "QPULib.h"
#include "tests/support.hpp"

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

// Returns the 16 integers that `f` computes from 0..15.
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

// Returns true if the backend is the emulator. The emulator stops compiled code where the
// hardware would fail, and its error messages differ from the interpreter's.
inline bool onEmulator() { return std::strcmp(qpu::backend().name, "emulator") == 0; }

// Applies `f` to two vectors whose elements have the bits a and b. Returns the bits of element 0
// of the result. The vectors are loaded from shared memory, so that the compiler cannot fold
// constants.
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

}  // namespace test

#endif
