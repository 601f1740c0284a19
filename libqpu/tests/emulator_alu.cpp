// Compares the emulator's vector operations with the interpreter's arithmetic on single elements.
// On x86, separate code handles the common case, so the operands include all cases.
#include <doctest/doctest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "emu/alu.hpp"
#include "error_facts.hpp"

namespace {

using namespace qpu::emu;
using qpu::detail::hex;
using qpu::isa::AddOp;
using qpu::isa::MulOp;
namespace interp = qpu::interp;

using Word = std::uint32_t;
using Reference = std::function<Word(Word, Word)>;

Word exactFadd(Word a, Word b) {
  const bool top = interp::hasTopExponent(a) || interp::hasTopExponent(b);
  return top ? interp::faddTop(a, b) : interp::fadd(a, b);
}
Word exactFsub(Word a, Word b) { return exactFadd(a, b ^ interp::kSign); }
Word exactFmul(Word a, Word b) {
  const bool top = interp::hasTopExponent(a) || interp::hasTopExponent(b);
  return top ? interp::fmulTop(a, b) : interp::fmul(a, b);
}

// Returns zeros, denormals, the smallest and greatest number of each kind, powers of two and the
// numbers next to them, Inf and NaN. Each of these values occurs with both signs.
std::vector<Word> specials() {
  std::vector<Word> all;
  for (const Word exponent : {0U, 1U, 2U, 23U, 24U, 25U, 63U, 102U, 103U, 104U, 126U, 127U, 128U,
                              149U, 150U, 151U, 157U, 158U, 159U, 191U, 230U, 252U, 253U, 254U,
                              255U})
    for (const Word mantissa : {0U, 1U, 2U, 0x200000U, 0x400000U, 0x7ffffeU, 0x7fffffU})
      for (const Word sign : {0U, 0x80000000U}) all.push_back(sign | exponent << 23U | mantissa);
  for (const Word integer : {3U, 255U, 0x7fffU, 0x8000U, 0xffffffU, 0x1000000U, 0xfffffffeU,
                             0xffff8000U, 0x12345678U})
    all.push_back(integer);
  return all;
}

// Calls f with vectors of operands: first with all pairs of special values, and then with random
// values. The exponents of random values are often similar, so that sums cancel. Some products of
// random values are close to the limits.
template <typename F>
void everyPair(F f) {
  const std::vector<Word> some = specials();
  Vector a{}, b{};
  std::size_t n = 0;
  const auto push = [&](Word x, Word y) {
    a.e[n] = x;
    b.e[n] = y;
    if (++n < kElements) return;
    n = 0;
    f(a, b);
  };
  for (const Word x : some)
    for (const Word y : some) push(x, y);
  std::mt19937 random(5);
  for (int i = 0; i < 400000; ++i) {
    const Word x = static_cast<Word>(random());
    Word y = static_cast<Word>(random());
    if (i % 4 == 1) y = (y & 0x807fffffU) | ((x & 0x7f800000U) ^ (y >> 3U & 0x1800000U));
    if (i % 4 == 2) y = x ^ (y & 0x8000000fU);
    if (i % 4 == 3) y = (y & 0x80ffffffU) | ((0x7e000000U - (x & 0x7f000000U)) & 0x7f000000U);
    push(x, y);
  }
  for (std::size_t rest = n; rest % kElements != 0; ++rest) push(0, 0);
}

void compare(const char* name, const std::function<void(const Vector&, const Vector&, Vector&)>& f,
             const Reference& reference) {
  int wrong = 0;
  everyPair([&](const Vector& a, const Vector& b) {
    Vector r;
    {
      [[maybe_unused]] const QpuRounding rounding;
      f(a, b, r);
    }
    for (std::size_t i = 0; i < kElements; ++i) {
      const Word expected = reference(a.e[i], b.e[i]);
      if (r.e[i] == expected || ++wrong > 3) continue;
      FAIL_CHECK(std::string(name) << " of " << hex(a.e[i]) << ", " << hex(b.e[i]) << " is "
                                   << hex(r.e[i]) << ", must be " << hex(expected));
    }
  });
  CHECK(wrong == 0);
}

void compareAdd(const char* name, AddOp op, const Reference& reference) {
  compare(
      name,
      [op](const Vector& a, const Vector& b, Vector& r) {
        add(static_cast<std::uint8_t>(op), a, b, r);
      },
      reference);
}

}  // namespace

TEST_CASE("float sums, differences and products match") {
  compareAdd("fadd", AddOp::FAdd, exactFadd);
  compareAdd("fsub", AddOp::FSub, exactFsub);
  compare(
      "fmul",
      [](const Vector& a, const Vector& b, Vector& r) { multiply(MulOp::FMul, a, b, r); },
      exactFmul);
}

TEST_CASE("conversions match") {
  compareAdd("ftoi", AddOp::FtoI, [](Word a, Word) { return interp::ftoi(a); });
  compareAdd("itof", AddOp::ItoF, [](Word a, Word) { return interp::itof(a); });
}

TEST_CASE("minima and maxima match") {
  compareAdd("fmin", AddOp::FMin, interp::fmin);
  compareAdd("fmax", AddOp::FMax, interp::fmax);
  compareAdd("fminabs", AddOp::FMinAbs, interp::fminabs);
  compareAdd("fmaxabs", AddOp::FMaxAbs, interp::fmaxabs);
}

TEST_CASE("QPU rounding does not affect special functions") {
  const auto reference = {interp::recip, interp::recipSqrt, interp::exp2, interp::log2};
  std::uint8_t address = qpu::isa::address::kSfuRecip;
  for (Word (*const f)(Word) : reference) {
    int wrong = 0;
    everyPair([&](const Vector& a, const Vector& b) {
      if (b.e[3] % 16 != 0) return;
      Vector r;
      {
        [[maybe_unused]] const QpuRounding rounding;
        special(address, a, r);
      }
      for (std::size_t i = 0; i < kElements; ++i) wrong += r.e[i] == f(a.e[i]) ? 0 : 1;
    });
    CHECK(wrong == 0);
    ++address;
  }
}

TEST_CASE("the host's rounding mode is restored") {
  volatile float one = 1.0F;
  volatile float small = 0x1p-24F;
  {
    [[maybe_unused]] const QpuRounding rounding;
    Vector a = interp::splat(0x3f800000);
    Vector r;
    add(static_cast<std::uint8_t>(AddOp::FAdd), a, a, r);
    CHECK(r.e[0] == 0x40000000);
  }
  CHECK(-one - small * 1.5F == -1.0F - 0x1p-23F);
}

TEST_CASE("element masks match") {
  everyPair([](const Vector& a, const Vector& b) {
    Mask n = 0, z = 0, borrow = 0, over = 0;
    Vector sum{}, difference{};
    for (std::size_t i = 0; i < kElements; ++i) {
      sum.e[i] = a.e[i] + b.e[i];
      difference.e[i] = a.e[i] - b.e[i];
      n |= (a.e[i] >> 31U) << i;
      z |= (difference.e[i] == 0 ? Mask{1} : 0) << i;
      borrow |= (a.e[i] < b.e[i] ? Mask{1} : 0) << i;
      over |= static_cast<Mask>((std::uint64_t{a.e[i]} + b.e[i]) >> 32U) << i;
    }
    const bool right = negative(a) == n && zero(difference) == z &&
                       carry(AddOp::Sub, a, b, difference) == borrow &&
                       carry(AddOp::Add, a, b, sum) == over;
    if (!right) FAIL_CHECK("flags of " << hex(a.e[0]) << ", " << hex(b.e[0]));
    Vector target = b;
    write(target, a, n);
    for (std::size_t i = 0; i < kElements; ++i)
      if (target.e[i] != ((n >> i & 1U) != 0 ? a.e[i] : b.e[i])) FAIL_CHECK("write " << i);
  });
}
