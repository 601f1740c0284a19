// Computes the results of the language's operations on a single element in plain C++. The results
// are used to check random kernels. The code follows docs/libqpu.md ("The language" and
// "Arithmetic"). The oracle shares no code with the interpreter or the emulator, so that it detects
// errors in either of them. Floats are passed as bit patterns. Operands with exponent 255 do not
// occur.
#ifndef QPU_FUZZ_ORACLE_HPP
#define QPU_FUZZ_ORACLE_HPP

#include <cstdint>
#include <limits>

namespace fuzz::oracle {

using Word = std::uint32_t;

constexpr Word kSignBit = 1U << 31U;
constexpr int kFractionBits = 23;

inline std::int64_t number(Word x) {
  return x < kSignBit ? std::int64_t{x} : std::int64_t{x} - (std::int64_t{1} << 32U);
}
inline Word low(std::int64_t x) { return static_cast<Word>(static_cast<std::uint64_t>(x)); }

inline Word product(Word a, Word b) {
  return static_cast<Word>(std::uint64_t{a % (1U << 24U)} * (b % (1U << 24U)));
}
inline Word shiftLeft(Word a, Word n) { return static_cast<Word>(std::uint64_t{a} << (n % 32)); }
inline Word shiftRight(Word a, Word n) { return static_cast<Word>(std::uint64_t{a} >> (n % 32)); }
inline Word shiftRightSigned(Word a, Word n) {
  const std::int64_t divisor = std::int64_t{1} << (n % 32);
  const std::int64_t x = number(a);
  return low(x >= 0 ? x / divisor : -((-x + divisor - 1) / divisor));
}
inline Word rotateBits(Word a, Word n) {
  const std::uint64_t twice = std::uint64_t{a} << 32U | a;
  return static_cast<Word>(twice >> (n % 32));
}

// A float, represented as sign * significand * 2^exponent. The significand is 0 for zero and for
// denormals.
struct Parts {
  bool negative = false;
  std::uint64_t significand = 0;
  int exponent = 0;
};
inline Parts parts(Word x) {
  const int biased = static_cast<int>(x / (1U << kFractionBits) % 256);
  if (biased == 0) return {};
  return {x >= kSignBit, (1U << kFractionBits) + x % (1U << kFractionBits), biased - 127 - kFractionBits};
}
// Rounds toward zero. Results that are too small become +0. Results that are too large do not
// occur.
inline Word floatOf(Parts p) {
  if (p.significand == 0) return 0;
  while (p.significand >= 2U << kFractionBits) {
    p.significand /= 2;
    ++p.exponent;
  }
  while (p.significand < 1U << kFractionBits) {
    p.significand *= 2;
    --p.exponent;
  }
  const int biased = p.exponent + 127 + kFractionBits;
  if (biased <= 0) return 0;
  return (p.negative ? kSignBit : 0U) + static_cast<Word>(biased) * (1U << kFractionBits) +
         static_cast<Word>(p.significand - (1U << kFractionBits));
}

inline Word sum(Word a, Word b) {
  Parts large = parts(a);
  Parts small = parts(b);
  if (large.significand == 0) return floatOf(small);
  if (small.significand == 0) return floatOf(large);
  if (small.exponent > large.exponent) {
    const Parts other = large;
    large = small;
    small = other;
  }
  // An operand that is this many bits below the last bit of the other operand affects only the
  // direction of rounding.
  constexpr int kFar = 36;
  if (large.exponent - small.exponent > kFar) small = {small.negative, 1, large.exponent - kFar};
  large.significand <<= static_cast<unsigned>(large.exponent - small.exponent);
  const auto x = static_cast<std::int64_t>(large.significand);
  const auto y = static_cast<std::int64_t>(small.significand);
  const std::int64_t both = (large.negative ? -x : x) + (small.negative ? -y : y);
  return floatOf({both < 0, static_cast<std::uint64_t>(both < 0 ? -both : both), small.exponent});
}
inline Word negated(Word a) { return a ^ kSignBit; }
inline Word difference(Word a, Word b) { return sum(a, negated(b)); }
inline Word times(Word a, Word b) {
  const Parts x = parts(a);
  const Parts y = parts(b);
  return floatOf({x.negative != y.negative, x.significand * y.significand, x.exponent + y.exponent});
}
// Converts normal floats and +0 to integers. The conversion preserves the order.
inline std::int64_t rank(Word x) { return x >= kSignBit ? -std::int64_t{x - kSignBit} : std::int64_t{x}; }
inline Word smaller(Word a, Word b) { return rank(a) <= rank(b) ? a : b; }
inline Word larger(Word a, Word b) { return rank(a) >= rank(b) ? a : b; }
inline Word magnitude(Word a) { return a % kSignBit; }
// Returns -1, 0 or 1. The function does not use the sign of the difference, because a difference
// that is too small for a normal float becomes 0.
inline int compareFloats(Word a, Word b) { return rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : 0; }

inline Word toFloat(Word a) {
  const std::int64_t x = number(a);
  return floatOf({x < 0, static_cast<std::uint64_t>(x < 0 ? -x : x), 0});
}
inline Word toInt(Word a) {
  Parts p = parts(a);
  if (p.exponent > 8) return 0;
  for (; p.exponent > 0; --p.exponent) p.significand *= 2;
  for (; p.exponent < 0 && p.significand != 0; ++p.exponent) p.significand /= 2;
  const auto x = static_cast<std::int64_t>(p.significand);
  const std::int64_t value = p.negative ? -x : x;
  if (value > std::numeric_limits<std::int32_t>::max() || value < std::numeric_limits<std::int32_t>::min()) return 0;
  return low(value);
}

}  // namespace fuzz::oracle

#endif
