// Functions of qpu/math.h that keep NaN, and give NaN and Inf where IEEE 754 does. QPUs
// compute with neither: an addition makes Inf of NaN, a comparison takes it for a number.
// The bits of a vector are looked at instead, in a few instructions beside a kernel's
// reads and writes. Include it after the headers of other libraries.
#ifndef TORCH_QPU_IEEE_H
#define TORCH_QPU_IEEE_H

#include <QPULib.h>

namespace torch_qpu::ieee {

constexpr int kInf = 0x7f800000;
constexpr int kNan = 0x7fc00000;
constexpr int kLeastNormal = 0x00800000;

inline IntExpr magnitude(const FloatExpr& x) { return asInt(x) & 0x7fffffff; }
inline FloatExpr nan() { return asFloat(IntExpr(kNan)); }

inline BoolExpr isNan(const FloatExpr& x) { return IntExpr(kInf) - magnitude(x) < 0; }

// x where that is NaN, else the result.
inline Float keepNan(const FloatExpr& x, const FloatExpr& result) {
  return qpu::select(isNan(x), x, result);
}

inline FloatExpr exp(const FloatExpr& x) { return keepNan(x, qpu::exp(x)); }
inline FloatExpr sigmoid(const FloatExpr& x) { return keepNan(x, qpu::sigmoid(x)); }
inline FloatExpr tanh(const FloatExpr& x) { return keepNan(x, qpu::tanh(x)); }
inline FloatExpr reciprocal(const FloatExpr& x) { return keepNan(x, qpu::reciprocal(x)); }
inline FloatExpr max(const FloatExpr& a, const FloatExpr& b) {
  return keepNan(b, keepNan(a, qpu::max(a, b)));
}
inline FloatExpr min(const FloatExpr& a, const FloatExpr& b) {
  return keepNan(b, keepNan(a, qpu::min(a, b)));
}
inline FloatExpr negative(const FloatExpr& x) {
  return asFloat(asInt(x) ^ static_cast<int>(0x80000000U));
}

// `finite` for numbers that are not below 0, `infinite` for Inf; else NaN. Denormals are 0.
inline Float ofPositive(const FloatExpr& x, const FloatExpr& finite, const FloatExpr& infinite) {
  Float r = finite;
  Where (asInt(x) >= kInf)
    r = infinite;
  End
  Where (isNan(x) || (asInt(x) < 0 && magnitude(x) >= kLeastNormal))
    r = nan();
  End
  return r;
}

inline FloatExpr log(const FloatExpr& x) { return ofPositive(x, qpu::log(x), x); }
inline FloatExpr sqrt(const FloatExpr& x) { return ofPositive(x, qpu::sqrt(x), x); }
inline FloatExpr reciprocalSqrt(const FloatExpr& x) {
  return ofPositive(x, qpu::reciprocalSqrt(x), 0);
}

// NaN too where both are 0, or both Inf.
inline FloatExpr div(const FloatExpr& a, const FloatExpr& b) {
  Int least = qpu::min(magnitude(a), magnitude(b));
  Int greatest = qpu::max(magnitude(a), magnitude(b));
  Float r = qpu::div(a, b);
  Where (greatest > kInf || least == kInf || greatest < kLeastNormal)
    r = nan();
  End
  return r;
}

}  // namespace torch_qpu::ieee

#endif
