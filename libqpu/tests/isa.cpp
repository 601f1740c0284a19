// Tests the encoding and decoding of instruction words.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>

#include "code/object.hpp"
#include "tests/isa_reference.hpp"

using namespace isa_build;
using qpu::isa::decode;
using qpu::isa::encode;
using qpu::isa::smallImmediate;
using qpu::isa::smallImmediateCode;
using qpu::isa::Word;

TEST_CASE("reference words encode and decode") {
  const std::vector<Reference> all = references();
  for (const Reference& r : all) {
    INFO(r.name);
    CHECK(encode(r.instruction) == r.word);
    const auto decoded = decode(r.word);
    REQUIRE(decoded);
    CHECK(*decoded == r.instruction);
    CHECK(encode(*decoded) == r.word);
  }
}

TEST_CASE("decoded words encode to the same word") {
  std::mt19937_64 random(3);
  int decoded = 0;
  for (int n = 0; n < 300000; ++n) {
    Word word = random();
    // Random words would rarely be branches or loads of immediates, and most of these would have
    // reserved bits set.
    if (n % 4 == 1) word = (word & 0x00ffffffffffffffU) | 0xf000000000000000U;
    if (n % 4 == 2) word = (word & 0xf9ffffffffffffffU) | 0xe000000000000000U;
    const auto i = decode(word);
    if (!i) continue;
    ++decoded;
    if (encode(*i) != word) FAIL_CHECK(word, " became ", encode(*i));
  }
  CHECK(decoded > 150000);
}

TEST_CASE("words with reserved fields do not decode") {
  for (unsigned op = 0; op < 32; ++op) {
    const bool reserved = (op >= 9 && op <= 11) || (op >= 25 && op <= 29);
    CHECK(decode(0x100009e7009e7000U | Word{op} << 24U).has_value() != reserved);
  }
  for (unsigned cond = 0; cond < 16; ++cond) {
    const bool reserved = cond >= 12 && cond <= 14;
    CHECK(decode(0xf00809e700000000U | Word{cond} << 52U).has_value() != reserved);
  }
  for (unsigned mode = 0; mode < 8; ++mode) {
    const bool reserved = mode == 2 || mode >= 5;
    CHECK(decode(0xe00009e700000000U | Word{mode} << 57U).has_value() != reserved);
  }
  CHECK_FALSE(decode(0xf1f809e7ffffffe0U));
}

TEST_CASE("small immediates have codes") {
  const auto bits = [](float f) {
    std::uint32_t b = 0;
    std::memcpy(&b, &f, sizeof b);
    return b;
  };
  for (int n = 0; n < 16; ++n) {
    CHECK(smallImmediate(byte(n)) == static_cast<std::uint32_t>(n));
    CHECK(smallImmediate(byte(16 + n)) == static_cast<std::uint32_t>(n - 16));
    CHECK(smallImmediate(byte(48 + n)) == static_cast<std::uint32_t>(n - 16));
  }
  for (int n = 0; n < 8; ++n) {
    CHECK(smallImmediate(byte(32 + n)) == bits(std::ldexp(1.0F, n)));
    CHECK(smallImmediate(byte(40 + n)) == bits(std::ldexp(1.0F, n - 8)));
  }
  for (int code = 0; code < 48; ++code)
    CHECK(smallImmediateCode(smallImmediate(byte(code))) == byte(code));
  CHECK_FALSE(smallImmediateCode(16));
  CHECK_FALSE(smallImmediateCode(static_cast<std::uint32_t>(-17)));
  CHECK_FALSE(smallImmediateCode(bits(256.0F)));
  CHECK_FALSE(smallImmediateCode(bits(-1.0F)));
}

TEST_CASE("uniform streams follow the object's order on each QPU") {
  using Kind = qpu::code::Uniform::Kind;
  qpu::code::Object object;
  object.parameters = 2;
  object.uniforms = {{Kind::Argument, 1},
                     {Kind::QpuNumber, 0},
                     {Kind::Constant, 77},
                     {Kind::QpuCount, 0},
                     {Kind::SpillBase, 0},
                     {Kind::Argument, 0}};
  const std::array<std::uint32_t, 2> arguments{5, 6};
  CHECK(qpu::code::uniformStream(object, 3, 12, arguments.data(), 0xc0010000U) ==
        std::vector<std::uint32_t>{6, 3, 77, 12, 0xc0010000U, 5});
  CHECK(qpu::code::uniformStream({}, 0, 1, nullptr, 0).empty());
}
