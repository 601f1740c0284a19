// Arithmetic on a single element. The code is written without branches, so that the compiler
// vectorises loops over 16 elements. The rules and the evidence for them are in docs/libqpu.md,
// "Arithmetic".
#ifndef QPU_SRC_INTERP_ARITH_HPP
#define QPU_SRC_INTERP_ARITH_HPP

#include <cmath>
#include <cstdint>
#include <cstring>

namespace qpu::interp {

constexpr std::uint32_t kExponent = 0x7f800000U;
constexpr std::uint32_t kSign = 0x80000000U;
constexpr std::uint32_t kMagnitude = 0x7fffffffU;

// Assumptions that a test on a board can confirm:
// - fmul truncates an inexact product. Test: square 0x3f800001 and compare the result with
//   0x3f800002.
constexpr bool kFmulTruncates = true;
// - An overflow of fadd gives Inf. Test: add 0x7f7fffff to itself.
// - ftoi gives 0x80000000 for -2^31, and 0 for larger magnitudes, as for Inf. Test: convert these
//   numbers.
// - mul24 sets the carry flag if the product exceeds the value below. Test: set flags from the MUL
//   pipe (op_add nop) with the products of 0xffffff and 1, 2 and 0x1000.
constexpr std::uint64_t kMul24CarryAbove = 0xffffffU;
// - Packing to half floats rounds away from zero (true) or to the nearest half float (false).
//   Test: pack 1 + 2^-13 to half a. If the result is 0x3c01, packing rounds away from zero.
constexpr bool kHalfRoundsAway = true;

template <typename To, typename From>
inline To bitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "both types must have the same size");
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
// Returns 0 if x is 0, and 1 otherwise. The function does not use a comparison, because SSE2 has no
// 64-bit comparison.
inline std::uint64_t isNotZero(std::uint64_t x) { return (x | (0 - x)) >> 63U; }

// Converts a double to a float by clearing the low 29 bits. The result is an infinity with the same
// sign if the magnitude is too large, and +0 if the magnitude is less than that of every normal
// float (2^-126).
inline std::uint32_t truncateToFloat(std::uint64_t bits) {
  const auto d = bitCast<double>(bits & ~std::uint64_t{0x1fffffff});
  const auto f = bitCast<std::uint32_t>(static_cast<float>(d));
  // The upper 32 bits of 2^-126 as a double.
  constexpr std::uint32_t upperOfLeastNormal = 0x38100000U;
  const auto upper = static_cast<std::uint32_t>(bits >> 32U) & kMagnitude;
  return f & ~mask(upper < upperOfLeastNormal);
}

// Returns the sum, rounded toward zero. `rest` is the rounding error of the double sum (two-sum).
// If this error points toward zero, the exact sum is closer to zero than the double sum.
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

// Multiplies two floats, whose product is exact as a double.
inline std::uint32_t fmul(std::uint32_t a, std::uint32_t b) {
  const double p = widen(a) * widen(b);
  if constexpr (kFmulTruncates) return truncateToFloat(bitCast<std::uint64_t>(p));
  const auto f = static_cast<float>(p);
  const auto bits = bitCast<std::uint32_t>(f);
  return isFlushed(bits) ? 0U : bits;
}

// An operand with the exponent 255 is treated as Inf with the operand's sign. The result is never
// NaN.
inline std::uint32_t faddTop(std::uint32_t a, std::uint32_t b) {
  return kExponent | ((hasTopExponent(b) ? b : a) & kSign);
}
inline std::uint32_t fmulTop(std::uint32_t a, std::uint32_t b) {
  return isFlushed(a) || isFlushed(b) ? 0U : kExponent | ((a ^ b) & kSign);
}

// Converts sign and magnitude to an integer. The conversion preserves the order. +0 and -0 are
// equal.
inline std::int32_t order(std::uint32_t x) {
  const auto m = static_cast<std::int32_t>(x & kMagnitude);
  return (x & kSign) != 0 ? -m : m;
}
inline std::uint32_t fmin(std::uint32_t a, std::uint32_t b) { return order(a) > order(b) ? b : a; }
inline std::uint32_t fmax(std::uint32_t a, std::uint32_t b) { return order(a) > order(b) ? a : b; }

inline std::uint32_t fminabs(std::uint32_t a, std::uint32_t b) {
  const std::uint32_t x = a & kMagnitude;
  const std::uint32_t y = b & kMagnitude;
  return x > y ? y : x;
}
inline std::uint32_t fmaxabs(std::uint32_t a, std::uint32_t b) {
  const std::uint32_t x = a & kMagnitude;
  const std::uint32_t y = b & kMagnitude;
  return x > y ? x : y;
}

// The special function unit, for which no table of results has been published. Samples from
// hardware differ from the exact results by about 3e-5 (exp2(0) = 1.000031, exp2(2) = 4.000122),
// and published hardware tests allow 1e-4. Assumption: the significand is the middle of the
// interval of length 2^-14 that contains the exact result. Therefore, even results that are powers
// of two are not exact. For log2, the error is absolute (log2(2) = 1 and log2(100) = 6.643829 have
// been published). Assumption: the results of log2 are multiples of 2^-15. Both assumptions can be
// tested with 2^16 samples per function on a board.
constexpr unsigned kSfuDroppedBits = 9;
constexpr double kSfuLogSteps = 0x1p15;
inline std::uint32_t sfuResult(double exact) {
  const auto bits = bitCast<std::uint32_t>(static_cast<float>(exact));
  if (hasTopExponent(bits)) return bits & ~(kMagnitude & ~kExponent);
  if (isFlushed(bits)) return 0;
  constexpr std::uint32_t dropped = (1U << kSfuDroppedBits) - 1U;
  return (bits & ~dropped) | (dropped + 1U) / 2U;
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
  const double steps = std::floor(std::log2(std::fabs(widen(a))) * kSfuLogSteps);
  const auto bits = bitCast<std::uint32_t>(static_cast<float>(steps / kSfuLogSteps));
  return isFlushed(bits) ? 0U : bits;
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

inline std::uint32_t clz(std::uint32_t a) {
  std::uint32_t n = 0;
  for (unsigned step = 16; step != 0; step /= 2)
    if ((a >> (32U - step)) == 0) {
      n += step;
      a <<= step;
    }
  return n + (a == 0 ? 1U : 0U);
}

// Applies f to each pair of corresponding bytes in a and b.
template <typename F>
inline std::uint32_t eachByte(std::uint32_t a, std::uint32_t b, F f) {
  std::uint32_t r = 0;
  for (unsigned at = 0; at < 32; at += 8)
    r |= static_cast<std::uint32_t>(f((a >> at) & 0xffU, (b >> at) & 0xffU)) << at;
  return r;
}
inline std::uint32_t v8adds(std::uint32_t a, std::uint32_t b) {
  return eachByte(a, b, [](auto x, auto y) { return x + y > 255U ? 255U : x + y; });
}
inline std::uint32_t v8subs(std::uint32_t a, std::uint32_t b) {
  return eachByte(a, b, [](auto x, auto y) { return x < y ? 0U : x - y; });
}
inline std::uint32_t v8min(std::uint32_t a, std::uint32_t b) {
  return eachByte(a, b, [](auto x, auto y) { return x < y ? x : y; });
}
inline std::uint32_t v8max(std::uint32_t a, std::uint32_t b) {
  return eachByte(a, b, [](auto x, auto y) { return x < y ? y : x; });
}
inline std::uint32_t v8muld(std::uint32_t a, std::uint32_t b) {
  return eachByte(a, b, [](auto x, auto y) { return (x * y + 127U) / 255U; });
}

// Converts a float to a half float. NaN and values that are too large become Inf. Values that are
// smaller than the normal half floats become +0.
inline std::uint32_t toHalf(std::uint32_t a) {
  constexpr std::uint32_t bias = 112;
  constexpr std::uint32_t inf = 0x7c00;
  const std::uint32_t sign = (a & kSign) >> 16U;
  const std::uint32_t exponent = (a & kExponent) >> 23U;
  if (exponent <= bias) return 0;
  if (exponent >= bias + 31) return sign | inf;
  const std::uint32_t exact = (a & kMagnitude) - (bias << 23U);
  constexpr std::uint32_t dropped = 0x1fff;
  std::uint32_t half = exact >> 13U;
  const std::uint32_t rest = exact & dropped;
  if (kHalfRoundsAway)
    half += rest != 0 ? 1U : 0U;
  else
    half += rest > 0x1000U || (rest == 0x1000U && (half & 1U) != 0) ? 1U : 0U;
  return sign | half;
}
// Converts a half float to a float. A denormal half float becomes a denormal float, which
// arithmetic treats as 0.
inline std::uint32_t fromHalf(std::uint32_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16U;
  const std::uint32_t exponent = (half >> 10U) & 0x1fU;
  const std::uint32_t mantissa = (half & 0x3ffU) << 13U;
  if (exponent == 0) return sign | mantissa;
  return sign | (exponent == 31 ? kExponent : (exponent + 112U) << 23U) | mantissa;
}
// Returns byte / 255, rounded toward zero.
inline std::uint32_t byteToFloat(std::uint32_t byte) {
  return truncateToFloat(bitCast<std::uint64_t>(static_cast<double>(byte) / 255.0));
}
// Converts 0.0..1.0 to the nearest integer in 0..255. Values outside this range are clamped.
// Assumption: ties are rounded up. Test: pack k/510 for odd k as colours.
inline std::uint32_t toColour(std::uint32_t a) {
  if ((a & kSign) != 0 || isFlushed(a)) return 0;
  const double scaled = hasTopExponent(a) ? 255.0 : widen(a) * 255.0 + 0.5;
  return scaled >= 255.0 ? 255U : static_cast<std::uint32_t>(scaled);
}

}  // namespace qpu::interp

#endif
