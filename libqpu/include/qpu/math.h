// Functions that consist of operations in the kernel language. Each call is expanded inline, like a
// macro. Errors are given in units in the last place (ulp) and assume the interpreter's rounding.
// The error bounds hold for special function units whose relative error is at most 1e-3. This limit
// is ten times the tolerance of the published hardware tests.
#ifndef QPU_MATH_H
#define QPU_MATH_H

#include <array>

#include "qpu/statement.h"

namespace qpu {

namespace detail {

// Evaluates a polynomial with Horner's method. The coefficient of the highest power comes first.
inline FloatExpr polynomial(const FloatExpr& x, const float* c, int count) {
  FloatExpr sum = c[0];
  for (int i = 1; i < count; ++i) sum = sum * x + c[i];
  return sum;
}

constexpr float kLeastNormal = 1.17549435e-38F;
constexpr float kGreatest = 3.40282347e38F;
// The value of ln 2 as a sum of two parts. The products of the high part and exponents are exact,
// because the high part has few significant bits.
constexpr float kLn2High = 0.693359375F;
constexpr float kLn2Low = -2.12194440e-4F;

}  // namespace detail

// Computes 1/x with two Newton-Raphson iterations. The error is at most 3 ulp. The result is Inf
// for 0 and denormals, and 0 if |x| > 2^126.
inline FloatExpr reciprocal(const FloatExpr& x) {
  FloatExpr r = recip(x);
  r = r * (FloatExpr(2) - x * r);
  return r * (FloatExpr(2) - x * r);
}

// Computes a/b. The error is at most 4 ulp where reciprocal(b) is within its error bound.
inline FloatExpr div(const FloatExpr& a, const FloatExpr& b) { return a * reciprocal(b); }

// Computes 1/sqrt(x) for normal x > 0 with two Newton-Raphson iterations. The error is at most 4
// ulp.
inline FloatExpr reciprocalSqrt(const FloatExpr& x) {
  // The usual form of an iteration computes x / 2, which is 0 for x < 2^-125. This code avoids that
  // division: `twice` is twice the result of the first iteration, and `half` is half of it.
  const FloatExpr y = rsqrt(x);
  const FloatExpr twice = y * (FloatExpr(3) - x * y * y);
  const FloatExpr half = twice * 0.25F;
  return half * (FloatExpr(3) - x * twice * half);
}

// Computes the square root. The error is at most 4 ulp. The result is 0 for negative x and
// denormals, and 2^64 for Inf.
inline FloatExpr sqrt(const FloatExpr& x) {
  const FloatExpr v = min(max(x, 0), detail::kGreatest);
  return v * reciprocalSqrt(v);
}

// Computes e^x without the special function unit. The error is at most 4 ulp. The result is Inf
// for x above 88.73, and 0 for x below -86.99, where e^x would be below 1.7e-38.
inline FloatExpr exp(const FloatExpr& x) {
  static const std::array<float, 6> c = {{1.9875691500e-4F, 1.3981999507e-3F, 8.3334519073e-3F,
                            4.1665795894e-2F, 1.6666665459e-1F, 5.0000001201e-1F}};
  const FloatExpr v = min(max(x, -87.5F), 89.4F);
  // The conversion truncates toward zero. Adding 192 makes the value positive, so that the
  // conversion rounds down.
  const IntExpr n = toInt(v * 1.44269504F + 192.5F) - 192;
  const FloatExpr scale = toFloat(n);
  const FloatExpr f = v - scale * detail::kLn2High - scale * detail::kLn2Low;
  const FloatExpr p = detail::polynomial(f, c.data(), 6) * (f * f) + f + 1;
  return (p + p) * asFloat((n + 126) << 23);
}

// Computes the natural logarithm. The error is at most 4 ulp, or 2e-7 near x = 1. The result is
// -Inf for 0, denormals and negative x.
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

// Computes 1 / (1 + e^-x). The error is at most 8 ulp. The result is 0 for x below -88.
inline FloatExpr sigmoid(const FloatExpr& x) { return reciprocal(exp(-x) + 1); }

// Computes the hyperbolic tangent. The error is at most 8 ulp.
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

// Selects `yes` for the elements where the mask is true, and `no` for the others. Both `yes` and `no`
// are evaluated.
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

// Reductions over the 16 elements of x. Every element of the result contains the reduced value.
// Sums first add the elements that are 8 positions apart, then those that are 4, 2 and 1 apart.
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
