// Variants of the functions in qpu/math.h that treat NaN and Inf as IEEE 754 requires. QPUs do not
// conform to IEEE 754 in this respect: an addition turns NaN into Inf, and min and max treat NaN as
// a number. The functions in this header therefore test the operands' bits, which takes a few more
// instructions. These variants treat denormals as 0.
#ifndef QPU_IEEE_H
#define QPU_IEEE_H

#include "qpu/math.h"

namespace qpu {
namespace ieee {

constexpr int kInf = 0x7f800000;
constexpr int kNan = 0x7fc00000;
constexpr int kLeastNormal = 0x00800000;
constexpr int kSign = static_cast<int>(0x80000000U);

inline IntExpr magnitude(const FloatExpr& x) { return asInt(x) & 0x7fffffff; }
inline FloatExpr nan() { return asFloat(IntExpr(kNan)); }
inline BoolExpr isNan(const FloatExpr& x) { return IntExpr(kInf) - magnitude(x) < 0; }

// Returns x in the elements where x is NaN, and `result` in the other elements.
inline Float keepNan(const FloatExpr& x, const FloatExpr& result) {
  return select(isNan(x), x, result);
}

inline FloatExpr exp(const FloatExpr& x) { return keepNan(x, qpu::exp(x)); }
inline FloatExpr sigmoid(const FloatExpr& x) { return keepNan(x, qpu::sigmoid(x)); }
inline FloatExpr tanh(const FloatExpr& x) { return keepNan(x, qpu::tanh(x)); }
inline FloatExpr reciprocal(const FloatExpr& x) { return keepNan(x, qpu::reciprocal(x)); }
inline FloatExpr relu(const FloatExpr& x) { return keepNan(x, qpu::max(x, 0)); }
inline FloatExpr max(const FloatExpr& a, const FloatExpr& b) {
  return keepNan(b, keepNan(a, qpu::max(a, b)));
}
inline FloatExpr min(const FloatExpr& a, const FloatExpr& b) {
  return keepNan(b, keepNan(a, qpu::min(a, b)));
}
inline FloatExpr negative(const FloatExpr& x) { return asFloat(asInt(x) ^ kSign); }

// Returns `ofNumber` where x is 0 or a finite positive number, `ofInf` where x is +Inf, and NaN in
// the other elements.
inline Float ofPositive(const FloatExpr& x, const FloatExpr& ofNumber, const FloatExpr& ofInf) {
  Float r = ofNumber;
  Where_(asInt(x) >= kInf);
  r = ofInf;
  End_();
  Where_(isNan(x) || (asInt(x) < 0 && magnitude(x) >= kLeastNormal));
  r = nan();
  End_();
  return r;
}

inline FloatExpr log(const FloatExpr& x) { return ofPositive(x, qpu::log(x), x); }
inline FloatExpr sqrt(const FloatExpr& x) { return ofPositive(x, qpu::sqrt(x), x); }
inline FloatExpr reciprocalSqrt(const FloatExpr& x) {
  return ofPositive(x, qpu::reciprocalSqrt(x), 0);
}

// As in IEEE 754, the result is NaN where both operands are 0 and where both operands are infinite.
// The error is at most 4 ulp for every normal b.
inline FloatExpr div(const FloatExpr& a, const FloatExpr& b) {
  constexpr int k2To125 = 0x7e000000;
  Int least = qpu::min(magnitude(a), magnitude(b));
  Int greatest = qpu::max(magnitude(a), magnitude(b));
  // The reciprocal of a large divisor would be a denormal, which is treated as 0.
  Float dividend = a;
  Float divisor = b;
  Where_(magnitude(b) >= k2To125);
  dividend = dividend * 0.25F;
  divisor = divisor * 0.25F;
  End_();
  Float r = qpu::div(dividend, divisor);
  Where_(greatest > kInf || least == kInf || greatest < kLeastNormal);
  r = nan();
  End_();
  return r;
}

}  // namespace ieee
}  // namespace qpu

#endif
