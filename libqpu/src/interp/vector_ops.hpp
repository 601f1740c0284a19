// Arithmetic on complete vectors.
#ifndef QPU_SRC_INTERP_VECTOR_OPS_HPP
#define QPU_SRC_INTERP_VECTOR_OPS_HPP

#include <algorithm>
#include <array>
#include <cstdint>

#include "interp/arith.hpp"

namespace qpu::interp {

constexpr std::size_t kElements = 16;

struct alignas(64) Vector {
  std::array<std::uint32_t, kElements> e;
};

inline Vector splat(std::uint32_t bits) {
  Vector v{};
  v.e.fill(bits);
  return v;
}

// The target can be one of the operands, because results are first stored in a local vector.
template <typename F>
inline void map(Vector& target, const Vector& a, const Vector& b, F f) {
  Vector r;
  for (std::size_t i = 0; i < kElements; ++i) r.e[i] = f(a.e[i], b.e[i]);
  target = r;
}
template <typename F>
inline void map(Vector& target, const Vector& a, F f) {
  Vector r;
  for (std::size_t i = 0; i < kElements; ++i) r.e[i] = f(a.e[i]);
  target = r;
}

inline bool anyTopExponent(const Vector& a, const Vector& b) {
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < kElements; ++i)
    found |= mask(hasTopExponent(a.e[i])) | mask(hasTopExponent(b.e[i]));
  return found != 0;
}

// Applies `f` to elements with ordinary operands, and `top` to elements with an operand whose
// exponent is 255. A second pass handles elements with exponent 255, because they are rare.
template <typename F, typename Top>
inline void mapFloat(Vector& target, const Vector& a, const Vector& b, F f, Top top) {
  Vector r;
  for (std::size_t i = 0; i < kElements; ++i) r.e[i] = f(a.e[i], b.e[i]);
  if (anyTopExponent(a, b))
    for (std::size_t i = 0; i < kElements; ++i)
      if (hasTopExponent(a.e[i]) || hasTopExponent(b.e[i])) r.e[i] = top(a.e[i], b.e[i]);
  target = r;
}

inline void vectorFadd(Vector& target, const Vector& a, const Vector& b) {
  mapFloat(target, a, b, fadd, faddTop);
}
inline void vectorFsub(Vector& target, const Vector& a, const Vector& b) {
  mapFloat(target, a, b, fsub,
           [](std::uint32_t x, std::uint32_t y) { return faddTop(x, y ^ kSign); });
}
inline void vectorFmul(Vector& target, const Vector& a, const Vector& b) {
  mapFloat(target, a, b, fmul, fmulTop);
}

// Floats are compared in the order that min and max use.
template <typename F>
inline void compareFloat(Vector& target, const Vector& a, const Vector& b, F f) {
  map(target, a, b, [f](std::uint32_t x, std::uint32_t y) { return mask(f(order(x), order(y))); });
}

inline bool isNegative(std::uint32_t x) { return (x & kSign) != 0; }

inline bool anySet(const Vector& m) {
  std::uint32_t found = 0;
  for (const std::uint32_t x : m.e) found |= x;
  return found != 0;
}
inline bool allSet(const Vector& m) {
  std::uint32_t found = UINT32_MAX;
  for (const std::uint32_t x : m.e) found &= x;
  return found != 0;
}

inline void rotateUp(Vector& target, const Vector& a, std::uint32_t n) {
  Vector r;
  std::copy(a.e.begin(), a.e.end() - n, r.e.begin() + n);
  std::copy(a.e.end() - n, a.e.end(), r.e.begin());
  target = r;
}

}  // namespace qpu::interp

#endif
