// Compares the arithmetic of the language with results that were recorded on hardware, and with the
// host's arithmetic, which is set to round toward zero.
#include <cfenv>
#include <cmath>
#include <random>
#include <vector>

#include "tests/run.hpp"

using test::bitsOf;
using test::floatBits;
using test::floatOf;
using test::ints;

namespace {

std::uint32_t added(std::uint32_t a, std::uint32_t b) {
  return floatBits(a, b, [](Float& x, Float& y) { return x + y; });
}
std::uint32_t subtracted(std::uint32_t a, std::uint32_t b) {
  return floatBits(a, b, [](Float& x, Float& y) { return x - y; });
}
std::uint32_t multiplied(std::uint32_t a, std::uint32_t b) {
  return floatBits(a, b, [](Float& x, Float& y) { return x * y; });
}
std::uint32_t lesser(std::uint32_t a, std::uint32_t b) {
  return floatBits(a, b, [](Float& x, Float& y) { return min(x, y); });
}
std::uint32_t greater(std::uint32_t a, std::uint32_t b) {
  return floatBits(a, b, [](Float& x, Float& y) { return max(x, y); });
}

int toInteger(std::uint32_t bits) {
  const float f = floatOf(bits);
  SharedArray<float> in(16);
  SharedArray<int> out(16);
  std::memcpy(in.data(), &f, 4);
  compile([](Ptr<Float> p, Ptr<Int> q) { *q = toInt(*p); })(&in, &out);
  return out[0];
}

std::uint32_t toFloatBits(std::uint32_t bits) {
  SharedArray<int> in(16);
  SharedArray<float> out(16);
  std::memcpy(in.data(), &bits, 4);
  compile([](Ptr<Int> p, Ptr<Float> q) { *q = toFloat(*p); })(&in, &out);
  std::uint32_t r = 0;
  std::memcpy(&r, out.data(), 4);
  return r;
}

}  // namespace

TEST_CASE("additions and subtractions match recorded results") {
  CHECK(added(0x80000000, 0x80000000) == 0x00000000);
  CHECK(added(0x80000000, 0x7fffffff) == 0x7f800000);
  CHECK(added(0x7fffffff, 0xffffffff) == 0xff800000);
  CHECK(added(0x00007fff, 0x00008000) == 0x00000000);
  CHECK(added(0x3f800000, 0x90000000) == 0x3f7fffff);
  CHECK(added(0x70000000, 0xbf800000) == 0x6fffffff);
  CHECK(added(0xf0000000, 0xbf800000) == 0xf0000000);
  CHECK(added(0x3f800000, 0xbf800000) == 0x00000000);
  CHECK(subtracted(0x7fffffff, 0x7fffffff) == 0xff800000);
  CHECK(subtracted(0x00000000, 0x80000000) == 0x00000000);
  CHECK(subtracted(0x90000000, 0xbf800000) == 0x3f7fffff);
}

TEST_CASE("minima and maxima match recorded results") {
  CHECK(lesser(0xffffffff, 0x70000000) == 0xffffffff);
  CHECK(lesser(0x00000001, 0x80000000) == 0x80000000);
  CHECK(lesser(0x3f800000, 0x00000001) == 0x00000001);
  CHECK(greater(0x00000000, 0x80000000) == 0x80000000);
  CHECK(greater(0x80000000, 0x00000000) == 0x00000000);
  CHECK(greater(0x7fffffff, 0x3f800000) == 0x7fffffff);
  CHECK(greater(0xffffffff, 0xf0000000) == 0xf0000000);
}

TEST_CASE("conversions match recorded results") {
  CHECK(toInteger(0xbf800000) == -1);
  CHECK(toInteger(0x7fffffff) == 0);
  CHECK(toFloatBits(0x7fffffff) == 0x4effffff);
  CHECK(toFloatBits(0x80000000) == 0xcf000000);
  CHECK(toFloatBits(0xbf800000) == 0xce810000);
}

TEST_CASE("conversions truncate, and give 0 when out of range") {
  CHECK(toInteger(bitsOf(2.99F)) == 2);
  CHECK(toInteger(bitsOf(-2.99F)) == -2);
  CHECK(toInteger(bitsOf(2147483520.0F)) == 2147483520);
  CHECK(toInteger(bitsOf(2147483648.0F)) == 0);
  CHECK(toInteger(bitsOf(-2147483648.0F)) == INT32_MIN);
  CHECK(toInteger(bitsOf(-4e9F)) == 0);
  CHECK(toInteger(0xff800000) == 0);
  CHECK(toInteger(0x00000001) == 0);
  CHECK(toFloatBits(0) == 0);
  CHECK(toFloatBits(16777217) == bitsOf(16777216.0F));
  CHECK(toFloatBits(static_cast<std::uint32_t>(-16777219)) == bitsOf(-16777218.0F));
}

TEST_CASE("Inf, NaN, zeros and denormals follow the documented rules") {
  const std::uint32_t inf = 0x7f800000;
  const std::uint32_t minusInf = 0xff800000;
  const std::uint32_t nan = 0x7fc00000;
  const std::uint32_t one = 0x3f800000;
  const std::uint32_t denormal = 0x007fffff;
  CHECK(added(nan, one) == inf);
  CHECK(added(one, minusInf) == minusInf);
  CHECK(added(minusInf, inf) == inf);  // the result has the sign of b
  CHECK(subtracted(inf, inf) == minusInf);
  CHECK(multiplied(inf, 0) == 0);
  CHECK(multiplied(nan, 0x80000000) == 0);
  CHECK(multiplied(denormal, inf) == 0);
  CHECK(multiplied(minusInf, one) == minusInf);
  CHECK(multiplied(minusInf, bitsOf(-2.0F)) == inf);
  CHECK(multiplied(0x80000000, one) == 0);
  CHECK(multiplied(denormal, one) == 0);
  CHECK(added(denormal, denormal) == 0);
  CHECK(multiplied(0x7f000000, 0x7f000000) == inf);
  CHECK(multiplied(0xff000000, 0x7f000000) == minusInf);
  CHECK(multiplied(0x00800000, 0x3f000000) == 0);
  // The next value below the smallest normal number is flushed to zero.
  CHECK(multiplied(0x00ffffff, 0x3f000000) == 0);
  CHECK(subtracted(0x00800001, 0x00800000) == 0);
  CHECK(added(0x80800001, 0x00800000) == 0);
}

TEST_CASE("assumptions that no board has confirmed") {
  CHECK(multiplied(0x3f800001, 0x3f800001) == 0x3f800002);  // the product is truncated
  CHECK(added(0x7f7fffff, 0x7f7fffff) == 0x7f800000);  // an overflow gives Inf
}

TEST_CASE("sums and products round toward zero like the host") {
  const std::size_t n = 16 * 2000;
  std::mt19937 random(1);
  SharedArray<float> a(n), b(n), sum(n), difference(n), product(n);
  const auto word = [&random] { return static_cast<std::uint32_t>(random()); };
  const auto number = [word](int spread) {
    // Similar exponents result in every possible alignment of the operands of a sum.
    const std::uint32_t exponent = 127U - static_cast<std::uint32_t>(spread) +
                                   word() % static_cast<std::uint32_t>(2 * spread + 1);
    std::uint32_t mantissa = word() & 0x7fffffU;
    if (word() % 4 == 0) mantissa &= 0x700000U;
    return floatOf((word() & 1U) << 31U | exponent << 23U | mantissa);
  };
  for (std::size_t i = 0; i < n; ++i) {
    const int spread = i % 3 == 0 ? 2 : i % 3 == 1 ? 30 : 62;
    a[i] = number(spread);
    b[i] = number(spread);
  }
  compile([](Int count, Ptr<Float> p, Ptr<Float> q, Ptr<Float> s, Ptr<Float> d, Ptr<Float> m) {
    For (Int i = 0, i < count, i = i + 16)
      Float x = p[i];
      Float y = q[i];
      s[i] = x + y;
      d[i] = x - y;
      m[i] = x * y;
    End
  })(static_cast<int>(n), &a, &b, &sum, &difference, &product);

  REQUIRE(std::fesetround(FE_TOWARDZERO) == 0);
  std::vector<float> s(n), d(n), m(n);
  for (std::size_t i = 0; i < n; ++i) {
    volatile float x = a[i];
    volatile float y = b[i];
    s[i] = x + y;
    d[i] = x - y;
    m[i] = x * y;
  }
  std::fesetround(FE_TONEAREST);
  std::size_t wrong = 0;
  std::size_t checked = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto same = [&](float expected, float found) {
      const bool tiny = std::fabs(expected) < 0x1p-126F;
      ++checked;
      if (bitsOf(tiny ? 0.0F : expected) != bitsOf(found)) ++wrong;
    };
    same(s[i], sum[i]);
    same(d[i], difference[i]);
    same(m[i], product[i]);
  }
  CHECK(checked == 3 * n);
  CHECK(wrong == 0);
}

TEST_CASE("float comparisons use sign and magnitude of the bits") {
  const auto truth = [](std::uint32_t a, std::uint32_t b) {
    int bits = 0;
    const auto one = [&](auto compare) {
      const std::uint32_t r = floatBits(a, b, [compare](Float& x, Float& y) -> Float {
        Float f = 0;
        Where (compare(x, y))
          f = 1;
        End
        return f;
      });
      bits = bits * 2 + (r != 0 ? 1 : 0);
    };
    one([](Float& x, Float& y) { return x < y; });
    one([](Float& x, Float& y) { return x <= y; });
    one([](Float& x, Float& y) { return x == y; });
    one([](Float& x, Float& y) { return x != y; });
    one([](Float& x, Float& y) { return x >= y; });
    one([](Float& x, Float& y) { return x > y; });
    return bits;
  };
  CHECK(truth(bitsOf(1.0F), bitsOf(2.0F)) == 0b110100);
  CHECK(truth(bitsOf(2.0F), bitsOf(1.0F)) == 0b000111);
  CHECK(truth(bitsOf(-1.5F), bitsOf(-1.5F)) == 0b011010);
  CHECK(truth(0x80000000, 0x00000000) == 0b011010);  // -0 equals +0
  CHECK(truth(0x00000001, 0x00000000) == 0b000111);  // a denormal is not equal to zero
  // These floats are not equal, although their difference is flushed to zero.
  CHECK(truth(0x00800001, 0x00800000) == 0b000111);
  CHECK(truth(0x7f7fffff, 0xff7fffff) == 0b000111);  // not equal, although their difference is Inf
  // Each infinity equals itself. +Inf is greater and -Inf is less than all finite floats.
  CHECK(truth(0x7f800000, 0x7f800000) == 0b011010);
  CHECK(truth(0xff800000, 0xff800000) == 0b011010);
  CHECK(truth(0xff800000, 0x7f800000) == 0b110100);
  CHECK(truth(0x7f800000, 0x7f7fffff) == 0b000111);
  CHECK(truth(0xff800000, 0xff7fffff) == 0b110100);
  // A positive NaN is greater than +Inf, and a negative NaN is less than -Inf. A NaN equals only a
  // NaN with the same bits.
  CHECK(truth(0x7fc00000, 0x7f800000) == 0b000111);
  CHECK(truth(0xffc00000, 0xff800000) == 0b110100);
  CHECK(truth(0x7fc00000, 0x7fc00000) == 0b011010);
}

TEST_CASE("integers wrap, products use 24 bits, shifts 5 bits") {
  CHECK(ints([](Int& x) { return x + INT32_MAX; })[1] == INT32_MIN);
  CHECK(ints([](Int& x) { return x - 1 - INT32_MAX - 1; })[0] == INT32_MAX);
  CHECK(ints([](Int& x) { return (x + 0xffffff) * 0xffffff; })[0] ==
        static_cast<int>(0xfffe000001ULL));
  CHECK(ints([](Int& x) { return (x + 0x1000003) * 5; })[0] == 15);
  CHECK(ints([](Int& x) { return (x - 3) * 7; })[0] == 0xfffffd * 7);
  CHECK(ints([](Int& x) { return x << 33; })[3] == 6);
  CHECK(ints([](Int& x) { return x >> 32; })[9] == 9);
  CHECK(ints([](Int& x) { return (x - 9) >> 31; })[8] == -1);
  CHECK(ints([](Int& x) { return ror(x, 32); })[5] == 5);
  CHECK(ints([](Int& x) { return shr(x - 1, 0); })[0] == -1);
}

TEST_CASE("signed comparisons are right despite overflow") {
  CHECK(ints([](Int& x) -> Int {
          Int low = x + INT32_MIN;
          Int r = 0;
          Where (low < 5)
            r = r + 1;
          End
          Where (Int(5) > low && low <= 5 && !(low >= 5) && low != 5)
            r = r + 2;
          End
          return r;
        })[0] == 3);
  CHECK(ints([](Int& x) { return max(x + INT32_MIN, 1); })[0] == 1);
  CHECK(ints([](Int& x) { return min(x + INT32_MIN, 1); })[0] == INT32_MIN);
}
