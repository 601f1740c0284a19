// Functions composed of the operations of the language. Each call is expanded inline, like a
// macro. Errors are in units in the last place (ulp) with the interpreter's rounding. The bounds
// hold for a special function unit with an error of up to 1e-3, ten times the tolerance of
// published hardware tests.
#ifndef QPU_MATH_H
#define QPU_MATH_H

#include <array>

#include "qpu/statement.h"

namespace qpu {

namespace detail {

// Horner's scheme, highest coefficient first.
inline FloatExpr polynomial(const FloatExpr& x, const float* c, int count) {
  FloatExpr sum = c[0];
  for (int i = 1; i < count; ++i) sum = sum * x + c[i];
  return sum;
}

constexpr float kLeastNormal = 1.17549435e-38F;
constexpr float kGreatest = 3.40282347e38F;
// ln 2 in two parts. The high part is short enough for its products with exponents to be exact.
constexpr float kLn2High = 0.693359375F;
constexpr float kLn2Low = -2.12194440e-4F;

}  // namespace detail

// 1/x by two Newton-Raphson iterations; error up to 3 ulp. 0 and denormals give Inf;
// |x| > 2^126 gives 0.
inline FloatExpr reciprocal(const FloatExpr& x) {
  FloatExpr r = recip(x);
  r = r * (FloatExpr(2) - x * r);
  return r * (FloatExpr(2) - x * r);
}

// a/b; error up to 4 ulp if reciprocal(b) is accurate.
inline FloatExpr div(const FloatExpr& a, const FloatExpr& b) { return a * reciprocal(b); }

// 1/sqrt(x) for normal x > 0; error up to 4 ulp.
inline FloatExpr reciprocalSqrt(const FloatExpr& x) {
  const FloatExpr half = x * 0.5F;
  FloatExpr y = rsqrt(x);
  y = y * (FloatExpr(1.5F) - half * y * y);
  return y * (FloatExpr(1.5F) - half * y * y);
}

// Square root; error up to 4 ulp. Negative x and denormals give 0, Inf gives 2^64.
inline FloatExpr sqrt(const FloatExpr& x) {
  const FloatExpr v = min(max(x, 0), detail::kGreatest);
  return v * reciprocalSqrt(v);
}

// e^x without the special function unit; error up to 4 ulp. x above 88.73 gives Inf,
// x below -86.99 (results under 1.7e-38) gives 0.
inline FloatExpr exp(const FloatExpr& x) {
  static const std::array<float, 6> c = {{1.9875691500e-4F, 1.3981999507e-3F, 8.3334519073e-3F,
                            4.1665795894e-2F, 1.6666665459e-1F, 5.0000001201e-1F}};
  const FloatExpr v = min(max(x, -87.5F), 89.4F);
  // Add 192 to make the value positive, because the conversion truncates.
  const IntExpr n = toInt(v * 1.44269504F + 192.5F) - 192;
  const FloatExpr scale = toFloat(n);
  const FloatExpr f = v - scale * detail::kLn2High - scale * detail::kLn2Low;
  const FloatExpr p = detail::polynomial(f, c.data(), 6) * (f * f) + f + 1;
  return (p + p) * asFloat((n + 126) << 23);
}

// Natural logarithm; error up to 4 ulp, or 2e-7 near 1. -Inf for 0, denormals and
// negative x.
inline FloatExpr log(const FloatExpr& x) {
  static const std::array<float, 9> c = {{7.0376836292e-2F,  -1.1514610310e-1F, 1.1676998740e-1F,
                            -1.2420140846e-1F, 1.4249322787e-1F,  -1.6668057665e-1F,
                            2.0000714765e-1F,  -2.4999993993e-1F, 3.3333331174e-1F}};
  const IntExpr bits = asInt(x);
  // x = m * 2^e with m near 1.
  const IntExpr e = (bits - 0x3f3504f3) >> 23;
  const FloatExpr f = asFloat(bits - (e << 23)) - 1;
  const FloatExpr z = f * f;
  const FloatExpr scale = toFloat(e);
  const FloatExpr rest =
      detail::polynomial(f, c.data(), 9) * z * f + scale * detail::kLn2Low - z * 0.5F;
  Float r = f + rest + scale * detail::kLn2High;
  Where_(x < detail::kLeastNormal);
  r = asFloat(IntExpr(static_cast<int>(0xff800000U)));
  End_();
  return r;
}

// 1 / (1 + e^-x); error up to 8 ulp. 0 below -88.
inline FloatExpr sigmoid(const FloatExpr& x) { return reciprocal(exp(-x) + 1); }

// Hyperbolic tangent; error up to 8 ulp.
inline FloatExpr tanh(const FloatExpr& x) {
  static const std::array<float, 5> c = {{-5.70498872745e-3F, 2.06390887954e-2F, -5.37397155531e-2F,
                            1.33314422036e-1F, -3.33332819422e-1F}};
  const FloatExpr size = abs(x);
  const FloatExpr z = x * x;
  Float r = FloatExpr(1) - reciprocal(exp(size + size) + 1) * 2;
  Where_(size < 0.625F);
  r = detail::polynomial(z, c.data(), 5) * z * size + size;
  End_();
  return asFloat(asInt(r) | (asInt(x) & static_cast<int>(0x80000000U)));
}

// Selects `yes` where the mask holds and `no` elsewhere. Both are computed.
inline Float select(const BoolExpr& mask, const FloatExpr& yes, const FloatExpr& no) {
  Float r = no;
  Where_(mask);
  r = yes;
  End_();
  return r;
}
inline Int select(const BoolExpr& mask, const IntExpr& yes, const IntExpr& no) {
  Int r = no;
  Where_(mask);
  r = yes;
  End_();
  return r;
}

// Reductions over the 16 elements of x, with the result in all elements. Sums add elements that
// are 8, then 4, 2 and 1 apart.
inline FloatExpr sumOf(const FloatExpr& x) {
  FloatExpr s = x;
  for (int n = 8; n > 0; n /= 2) s = s + rotate(s, n);
  return s;
}
inline IntExpr sumOf(const IntExpr& x) {
  IntExpr s = x;
  for (int n = 8; n > 0; n /= 2) s = s + rotate(s, n);
  return s;
}
inline FloatExpr maxOf(const FloatExpr& x) {
  FloatExpr s = x;
  for (int n = 8; n > 0; n /= 2) s = max(s, rotate(s, n));
  return s;
}
inline IntExpr maxOf(const IntExpr& x) {
  IntExpr s = x;
  for (int n = 8; n > 0; n /= 2) s = max(s, rotate(s, n));
  return s;
}
inline FloatExpr minOf(const FloatExpr& x) {
  FloatExpr s = x;
  for (int n = 8; n > 0; n /= 2) s = min(s, rotate(s, n));
  return s;
}
inline IntExpr minOf(const IntExpr& x) {
  IntExpr s = x;
  for (int n = 8; n > 0; n /= 2) s = min(s, rotate(s, n));
  return s;
}

}  // namespace qpu

#endif
