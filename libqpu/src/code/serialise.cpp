#include "code/serialise.hpp"

#include <stdexcept>
#include <type_traits>

namespace qpu::code {
namespace {

// The magic string contains a carriage return and a zero byte. Text conversions change carriage
// returns, and text files do not contain zero bytes.
constexpr std::string_view kMagic("QPUobj\r\0", 8);
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHashAt = 16;
constexpr std::size_t kHeader = 24;
constexpr std::uint32_t kLine = 64;  // bytes in a cache line; a spill area consists of whole lines

std::uint64_t hash(std::string_view data, std::uint64_t from) {
  for (const char c : data) from = (from ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return from;
}

std::uint64_t hashOf(std::string_view header, std::string_view content) {
  return hash(content, hash(header.substr(0, kHashAt), 0xcbf29ce484222325U));
}

// Returns the length of the UTF-8 sequence at the start of `s`, or 0 if there is no valid
// sequence.
std::size_t sequence(std::string_view s) {
  const auto byte = [&](std::size_t n) { return static_cast<unsigned char>(s[n]); };
  if (s.empty()) return 0;
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || s.size() < length) return 0;
  for (std::size_t n = 1; n < length; ++n)
    if ((byte(n) & 0xc0U) != 0x80) return 0;
  // Reject overlong encodings, surrogates and code points above U+10FFFF.
  const unsigned second = byte(1);
  const bool wrong = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                     (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
  return wrong ? 0 : length;
}

bool isUtf8(std::string_view s) {
  while (!s.empty()) {
    const std::size_t length = sequence(s);
    if (length == 0) return false;
    s.remove_prefix(length);
  }
  return true;
}

// Replaces invalid bytes with U+FFFD. The names of kernels and paths can be in any encoding.
std::string asUtf8(std::string_view s) {
  std::string text;
  while (!s.empty()) {
    const std::size_t length = sequence(s);
    text += length == 0 ? std::string_view("\xef\xbf\xbd") : s.substr(0, length);
    s.remove_prefix(length == 0 ? 1 : length);
  }
  return text;
}

class Writer {
 public:
  template <class T>
  void number(T value) {
    static_assert(std::is_unsigned_v<T>);
    for (std::size_t n = 0; n < sizeof value; ++n)
      out_ += static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * n) & 0xffU);
  }
  void length(std::size_t n) {
    if (n > UINT32_MAX) throw std::length_error("the kernel is larger than 4 GB");
    number(static_cast<std::uint32_t>(n));
  }
  void text(std::string_view s) {
    const std::string utf8 = asUtf8(s);
    length(utf8.size());
    out_ += utf8;
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads data from a string. A read beyond the end returns zeros and makes the reader invalid.
class Reader {
 public:
  explicit Reader(std::string_view data) : data_(data) {}

  bool isValid() const { return isValid_; }
  bool isAtEnd() const { return isValid_ && data_.empty(); }
  void require(bool condition) { isValid_ = isValid_ && condition; }

  template <class T>
  T number() {
    static_assert(std::is_unsigned_v<T>);
    const std::string_view bytes = take(sizeof(T));
    std::uint64_t value = 0;
    for (std::size_t n = 0; n < bytes.size(); ++n)
      value |= std::uint64_t{static_cast<unsigned char>(bytes[n])} << (8 * n);
    return static_cast<T>(value);
  }
  std::string text() {
    const std::string_view s = take(number<std::uint32_t>());
    require(isUtf8(s));
    return std::string(s);
  }

  // Reads the length of a list. Each entry of the list has at least `bytes` bytes.
  std::size_t length(std::size_t bytes) {
    const std::size_t n = number<std::uint32_t>();
    require(n <= data_.size() / bytes);
    return isValid_ ? n : 0;
  }

 private:
  std::string_view take(std::size_t n) {
    require(n <= data_.size());
    if (!isValid_) return {};
    const std::string_view taken = data_.substr(0, n);
    data_.remove_prefix(n);
    return taken;
  }

  std::string_view data_;
  bool isValid_ = true;
};

Uniform readUniform(Reader& in, std::uint32_t parameters) {
  Uniform u;
  const auto kind = in.number<std::uint8_t>();
  in.require(kind <= static_cast<std::uint8_t>(Uniform::Kind::Constant));
  u.kind = static_cast<Uniform::Kind>(kind);
  u.value = in.number<std::uint32_t>();
  in.require(u.kind != Uniform::Kind::Argument || u.value < parameters);
  return u;
}

Object readObject(Reader& in) {
  Object object;
  object.name = in.text();
  object.parameters = in.number<std::uint32_t>();
  object.spillBytes = in.number<std::uint32_t>();
  in.require(object.spillBytes % kLine == 0);
  const auto sfu = in.number<std::uint8_t>();
  in.require(sfu <= 1);
  object.usesSfu = sfu == 1;
  object.uniforms.resize(in.length(5));
  for (Uniform& u : object.uniforms) u = readUniform(in, object.parameters);
  object.sites.resize(in.length(8));
  for (Site& s : object.sites) {
    s.construct = in.text();
    s.description = in.text();
  }
  const std::size_t words = in.length(12);
  object.words.resize(words);
  object.siteOf.resize(words);
  for (isa::Word& word : object.words) word = in.number<isa::Word>();
  for (std::uint32_t& site : object.siteOf) {
    site = in.number<std::uint32_t>();
    in.require(site == Object::kNoSite || site < object.sites.size());
  }
  return object;
}

}  // namespace

std::string seal(std::string_view content) {
  Writer start;
  start.number(kVersion);
  start.length(content.size());
  const std::string header = std::string(kMagic) + start.take();
  Writer check;
  check.number(hashOf(header, content));
  return header + check.take() + std::string(content);
}

std::string save(const Object& object) {
  Writer out;
  out.text(object.name);
  out.number(object.parameters);
  out.number(object.spillBytes);
  out.number(static_cast<std::uint8_t>(object.usesSfu ? 1 : 0));
  out.length(object.uniforms.size());
  for (const Uniform& u : object.uniforms) {
    out.number(static_cast<std::uint8_t>(u.kind));
    out.number(u.value);
  }
  out.length(object.sites.size());
  for (const Site& s : object.sites) {
    out.text(s.construct);
    out.text(s.description);
  }
  out.length(object.words.size());
  for (const isa::Word word : object.words) out.number(word);
  for (std::size_t n = 0; n < object.words.size(); ++n)
    out.number(n < object.siteOf.size() ? object.siteOf[n] : Object::kNoSite);
  return seal(out.take());
}

bool looksSaved(std::string_view data) { return data.substr(0, kMagic.size()) == kMagic; }

std::optional<Object> load(std::string_view data) {
  if (data.size() < kHeader || !looksSaved(data)) return {};
  Reader header(data.substr(kMagic.size(), kHeader - kMagic.size()));
  const std::string_view content = data.substr(kHeader);
  header.require(header.number<std::uint32_t>() == kVersion);
  header.require(header.number<std::uint32_t>() == content.size());
  header.require(header.number<std::uint64_t>() == hashOf(data, content));
  if (!header.isValid()) return {};
  Reader in(content);
  Object object = readObject(in);
  if (!in.isAtEnd()) return {};
  return object;
}

}  // namespace qpu::code
