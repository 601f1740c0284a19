// Arithmetic of one element, written without branches so that loops over 16
// elements vectorise. Rules and evidence: docs/libqpu.md, "Arithmetic".
#ifndef QPU_SRC_INTERP_ARITH_HPP
#define QPU_SRC_INTERP_ARITH_HPP

#include <cmath>
#include <cstdint>
#include <cstring>

namespace qpu::interp {

constexpr std::uint32_t kExponent = 0x7f800000U;
constexpr std::uint32_t kSign = 0x80000000U;
constexpr std::uint32_t kMagnitude = 0x7fffffffU;

// Guesses, each with the board test that would settle it.
// fmul of an inexact product: square 0x3f800001 and compare with 0x3f800002.
constexpr bool kFmulTruncates = true;
// fadd overflow: 0x7f7fffff plus itself; expected Inf.
// ftoi of -2^31: expected 0x80000000; of larger magnitudes: 0, as Inf gives.

template <typename To, typename From>
inline To bitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline std::uint32_t mask(bool b) { return b ? UINT32_MAX : 0U; }
inline std::int32_t asSigned(std::uint32_t x) { return bitCast<std::int32_t>(x); }
inline bool hasTopExponent(std::uint32_t x) { return (x & kExponent) == kExponent; }
inline bool isFlushed(std::uint32_t x) { return (x & kExponent) == 0; }
inline double widen(std::uint32_t x) {
  return static_cast<double>(bitCast<float>(x & ~mask(isFlushed(x))));
}
// 1 unless x is 0; no comparison, for SSE2 has none of 64 bits.
inline std::uint64_t isNotZero(std::uint64_t x) { return (x | (0 - x)) >> 63U; }

// A double whose low 29 bits are dropped is a float, or overflows to Inf, or is
// below the normal floats and becomes +0.
inline std::uint32_t truncateToFloat(std::uint64_t bits) {
  const auto d = bitCast<double>(bits & ~std::uint64_t{0x1fffffff});
  const auto f = bitCast<std::uint32_t>(static_cast<float>(d));
  constexpr std::uint32_t upperOfLeastNormal = 0x38100000U;  // of 2^-126 as a double
  const auto upper = static_cast<std::uint32_t>(bits >> 32U) & kMagnitude;
  return f & ~mask(upper < upperOfLeastNormal);
}

// Sum rounded toward zero. The double sum is off by `rest` (two-sum); where the
// rest points toward zero the true sum lies below the double one.
inline std::uint32_t fadd(std::uint32_t a, std::uint32_t b) {
  const double x = widen(a);
  const double y = widen(b);
  const double s = x + y;
  const double t = s - x;
  const double rest = (x - (s - t)) + (y - t);
  const auto restBits = bitCast<std::uint64_t>(rest);
  const auto sumBits = bitCast<std::uint64_t>(s);
  const std::uint64_t opposite = (restBits ^ sumBits) >> 63U;
  return truncateToFloat(sumBits - (opposite & isNotZero(restBits << 1U)));
}

inline std::uint32_t fsub(std::uint32_t a, std::uint32_t b) { return fadd(a, b ^ kSign); }

// The double product of two floats is exact.
inline std::uint32_t fmul(std::uint32_t a, std::uint32_t b) {
  const double p = widen(a) * widen(b);
  if constexpr (kFmulTruncates) return truncateToFloat(bitCast<std::uint64_t>(p));
  const auto f = static_cast<float>(p);
  const auto bits = bitCast<std::uint32_t>(f);
  return isFlushed(bits) ? 0U : bits;
}

// Operands with exponent 255 are Inf of some sign; NaN never comes out.
inline std::uint32_t faddTop(std::uint32_t a, std::uint32_t b) {
  return kExponent | ((hasTopExponent(b) ? b : a) & kSign);
}
inline std::uint32_t fmulTop(std::uint32_t a, std::uint32_t b) {
  return isFlushed(a) || isFlushed(b) ? 0U : kExponent | ((a ^ b) & kSign);
}

// Sign and magnitude as an ordered integer; +0 and -0 are one.
inline std::int32_t order(std::uint32_t x) {
  const auto m = static_cast<std::int32_t>(x & kMagnitude);
  return (x & kSign) != 0 ? -m : m;
}
inline std::uint32_t fmin(std::uint32_t a, std::uint32_t b) { return order(a) > order(b) ? b : a; }
inline std::uint32_t fmax(std::uint32_t a, std::uint32_t b) { return order(a) > order(b) ? a : b; }

inline std::uint32_t fmaxabs(std::uint32_t a, std::uint32_t b) {
  const std::uint32_t x = a & kMagnitude;
  const std::uint32_t y = b & kMagnitude;
  return x > y ? x : y;
}

// The special function unit: no table of its results is published, about 12 of
// the 24 bits are right. Guess: the exact result cut to 12 bits after the binary
// point of the significand. Settle it by 2^16 samples per function of a board.
constexpr unsigned kSfuDroppedBits = 11;
inline std::uint32_t sfuResult(double exact) {
  const auto bits = bitCast<std::uint32_t>(static_cast<float>(exact));
  if (hasTopExponent(bits)) return bits & ~(kMagnitude & ~kExponent);
  if (isFlushed(bits)) return 0;
  return bits & ~((1U << kSfuDroppedBits) - 1U);
}
inline std::uint32_t recip(std::uint32_t a) {
  if (isFlushed(a)) return kExponent;
  if (hasTopExponent(a)) return 0;
  return sfuResult(1.0 / widen(a));
}
inline std::uint32_t recipSqrt(std::uint32_t a) {
  if (isFlushed(a)) return kExponent;
  if (hasTopExponent(a)) return 0;
  return sfuResult(1.0 / std::sqrt(std::fabs(widen(a))));
}
inline std::uint32_t exp2(std::uint32_t a) {
  if (hasTopExponent(a)) return (a & kSign) != 0 ? 0U : kExponent;
  return sfuResult(std::exp2(widen(a)));
}
inline std::uint32_t log2(std::uint32_t a) {
  if (isFlushed(a)) return kSign | kExponent;
  if (hasTopExponent(a)) return kExponent;
  return sfuResult(std::log2(std::fabs(widen(a))));
}

inline std::uint32_t itof(std::uint32_t a) {
  return truncateToFloat(bitCast<std::uint64_t>(static_cast<double>(asSigned(a))));
}
inline std::uint32_t ftoi(std::uint32_t a) {
  const double d = widen(hasTopExponent(a) ? 0U : a);
  const bool fits = d >= -0x1p31 && d < 0x1p31;
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(fits ? d : 0.0));
}

inline std::uint32_t mul24(std::uint32_t a, std::uint32_t b) {
  return (a & 0xffffffU) * (b & 0xffffffU);
}
inline std::uint32_t shl(std::uint32_t a, std::uint32_t b) { return a << (b & 31U); }
inline std::uint32_t shr(std::uint32_t a, std::uint32_t b) { return a >> (b & 31U); }
inline std::uint32_t asr(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>(asSigned(a) >> (b & 31U));
}
inline std::uint32_t ror(std::uint32_t a, std::uint32_t b) {
  const std::uint32_t n = b & 31U;
  return (a >> n) | (a << ((32U - n) & 31U));
}

}  // namespace qpu::interp

#endif
