// Tests saving and loading objects, and the rejection of invalid bytes.
#include <doctest/doctest.h>

#include <random>

#include "code/serialise.hpp"

using qpu::code::load;
using qpu::code::looksSaved;
using qpu::code::Object;
using qpu::code::save;
using qpu::code::seal;
using Kind = qpu::code::Uniform::Kind;

namespace {

Object example() {
  Object o;
  o.name = "rot3D";
  o.parameters = 3;
  o.words = {0x100009e7009e7000, 0x300009e7009e7000, 0x100009e7009e7000, 0x100009e7009e7000};
  o.uniforms = {{Kind::QpuNumber, 0},
                {Kind::QpuCount, 0},
                {Kind::Argument, 2},
                {Kind::SpillBase, 0},
                {Kind::Constant, 0xdeadbeef}};
  o.sites = {{"store", "store at rot3d.cpp:12"}, {"For", std::string("a\0b", 3)}};
  o.siteOf = {0, Object::kNoSite, 1, 0};
  o.spillBytes = 128;
  o.usesSfu = true;
  return o;
}

void checkSame(const Object& a, const Object& b) {
  CHECK(a.name == b.name);
  CHECK(a.parameters == b.parameters);
  CHECK(a.words == b.words);
  REQUIRE(a.uniforms.size() == b.uniforms.size());
  for (std::size_t n = 0; n < a.uniforms.size(); ++n) {
    CHECK(a.uniforms[n].kind == b.uniforms[n].kind);
    CHECK(a.uniforms[n].value == b.uniforms[n].value);
  }
  REQUIRE(a.sites.size() == b.sites.size());
  for (std::size_t n = 0; n < a.sites.size(); ++n) {
    CHECK(a.sites[n].construct == b.sites[n].construct);
    CHECK(a.sites[n].description == b.sites[n].description);
  }
  CHECK(a.siteOf == b.siteOf);
  CHECK(a.spillBytes == b.spillBytes);
  CHECK(a.usesSfu == b.usesSfu);
}

// Loads a valid file after replacing its content from `at` on with `bytes` and updating the
// checksum.
std::optional<Object> loadPatched(std::size_t at, const std::string& bytes) {
  std::string content = save(example()).substr(24);
  content.replace(at, bytes.size(), bytes);
  return load(seal(content));
}

}  // namespace

TEST_CASE("saved objects load unchanged") {
  const auto o = load(save(example()));
  REQUIRE(o);
  checkSame(*o, example());
  const auto empty = load(save({}));
  REQUIRE(empty);
  checkSame(*empty, {});
}

TEST_CASE("text in another encoding is saved as valid UTF-8") {
  Object o = example();
  o.name = "caf\xe9 \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80";
  o.sites[0].description = "store at M\xfcller.cpp:12";
  const auto back = load(save(o));
  REQUIRE(back);
  CHECK(back->name == "caf\xef\xbf\xbd \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  CHECK(back->sites[0].description == "store at M\xef\xbf\xbdller.cpp:12");
}

TEST_CASE("text that is not UTF-8 is rejected") {
  // These bytes replace "rot3", the start of the name.
  CHECK(loadPatched(4, "\xe2\x82\xac" "D"));
  for (const char* const bytes :
       {"\xff", "\x80", "\xc0\x80", "\xc3(", "\xe0\x80\x80", "\xe2\x82" "A", "\xed\xa0\x80",
        "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80"}) {
    INFO(std::string(bytes));
    CHECK_FALSE(loadPatched(4, bytes));
  }
  CHECK_FALSE(loadPatched(8, "\xe2"));  // the sequence is cut off by the end of the name
}

TEST_CASE("saved bytes follow the file format") {
  Object o;
  o.name = "ab";
  o.words = {0x0102030405060708};
  o.siteOf = {Object::kNoSite};
  const std::string content("\2\0\0\0ab"
                            "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
                            "\1\0\0\0\10\7\6\5\4\3\2\1\xff\xff\xff\xff",
                            39);
  const std::string data = save(o);
  CHECK(data.substr(0, 16) == std::string("QPUobj\r\0\1\0\0\0\x27\0\0\0", 16));
  CHECK(data.substr(24) == content);
  CHECK(data == seal(content));
}

TEST_CASE("truncated, altered and extended files are rejected") {
  const std::string data = save(example());
  for (std::size_t n = 0; n < data.size(); ++n) CHECK_FALSE(load(data.substr(0, n)));
  for (std::size_t n = 0; n < data.size(); ++n) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      std::string bad = data;
      bad[n] = static_cast<char>(static_cast<unsigned char>(bad[n]) ^ 1U << bit);
      if (load(bad)) FAIL_CHECK("bit ", bit, " of byte ", n);
    }
  }
  CHECK_FALSE(load(data + '\0'));
  CHECK_FALSE(load(data + data));
  CHECK_FALSE(load(std::string(data.size(), '\0')));
  CHECK_FALSE(load("\x7f"
                   "ELF and so on, which is another format"));
}

TEST_CASE("files of a later version are rejected") {
  std::string data = save(example());
  data[8] = 2;
  CHECK(looksSaved(data));
  CHECK_FALSE(load(data));
}

TEST_CASE("invalid objects with a valid checksum are rejected") {
  // Sizes in bytes: name 4+5, parameters 4, spill area 4, SFU flag 1, uniforms 4+25. The sites, the
  // words and the sites of the words follow.
  constexpr std::size_t kSpill = 13, kSfu = 17, kUniforms = 18, kArgument = 22 + 2 * 5;
  REQUIRE(loadPatched(0, ""));
  CHECK_FALSE(loadPatched(0, "\xff\xff\xff\xff"));
  CHECK_FALSE(loadPatched(kSpill, "\x01"));
  CHECK_FALSE(loadPatched(kSfu, "\x02"));
  CHECK_FALSE(loadPatched(kUniforms, "\xff\xff\xff\xff"));
  CHECK_FALSE(loadPatched(kArgument, "\x05"));
  CHECK_FALSE(loadPatched(kArgument + 1, "\x03"));
  const std::size_t last = save(example()).size() - 24 - 4;
  CHECK(loadPatched(last, "\x01"));
  CHECK_FALSE(loadPatched(last, "\x02"));
  CHECK_FALSE(load(seal(save(example()).substr(24) + "x")));
  CHECK_FALSE(load(seal("")));
}

TEST_CASE("loading random contents does not crash") {
  std::mt19937 random(11);
  const std::string content = save(example()).substr(24);
  int sound = 0;
  for (int n = 0; n < 50000; ++n) {
    std::string bad = content;
    for (unsigned changes = random() % 4 + 1; changes > 0; --changes)
      bad[random() % bad.size()] = static_cast<char>(random());
    if (const auto o = load(seal(bad))) {
      ++sound;
      if (o->siteOf.size() != o->words.size()) FAIL_CHECK("site numbers missing");
      if (save(*o) != seal(bad)) FAIL_CHECK("saved differently");
    }
  }
  CHECK(sound > 1000);
}
