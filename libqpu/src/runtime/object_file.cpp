#include "runtime/object_file.hpp"

#include <array>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "code/serialise.hpp"
#include "error_facts.hpp"
#include "isa/text.hpp"

namespace qpu::runtime {
namespace {

constexpr std::size_t kWordBytes = 8;

std::string_view trimmed(std::string_view line) {
  const std::size_t comment = line.find('#');
  if (comment != std::string_view::npos) line = line.substr(0, comment);
  const std::size_t first = line.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return line.substr(first, line.find_last_not_of(" \t\r") - first + 1);
}

}  // namespace

void saveObject(const code::Object& object, const std::string& path) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << code::save(object);
  file.close();
  if (!file) detail::raise<ArgumentError>("cannot write " + path);
}

code::Object readObject(std::string_view data, const std::string& name) {
  if (code::looksSaved(data)) {
    auto object = code::load(data);
    if (object) return std::move(*object);
    detail::raise<ArgumentError>(
        name + " is damaged or was saved by another version of libqpu; save it again");
  }
  if (data.empty() || data.size() % kWordBytes != 0)
    detail::raise<ArgumentError>(name + " has " + std::to_string(data.size()) +
                                 " bytes, expected a saved kernel or a multiple of 8 bytes");
  std::vector<isa::Word> words(data.size() / kWordBytes);
  for (std::size_t i = 0; i < words.size(); ++i)
    for (std::size_t b = kWordBytes; b-- > 0;)
      words[i] = words[i] << 8U | static_cast<unsigned char>(data[kWordBytes * i + b]);
  return objectOf(words.data(), words.size(), name);
}

code::Object openObject(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) detail::raise<ArgumentError>("cannot open " + path);
  const std::string data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) detail::raise<ArgumentError>("cannot read " + path);
  return readObject(data, path);
}

code::Object objectOf(const isa::Word* words, std::size_t count, const std::string& name) {
  if (words == nullptr || count == 0)
    detail::raise<ArgumentError>("program '" + name + "' has no words");
  code::Object object;
  object.name = name;
  object.words.assign(words, words + count);
  object.siteOf.assign(count, code::Object::kNoSite);
  return object;
}

std::vector<isa::Word> assembleLines(std::string_view text) {
  std::vector<isa::Word> words;
  std::size_t number = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = trimmed(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    if (line.empty()) continue;
    try {
      words.push_back(isa::assemble(line));
    } catch (const std::invalid_argument& e) {
      detail::raise<ArgumentError>("line " + std::to_string(number) + ", " + e.what() + ": " +
                                   std::string(line));
    }
  }
  return words;
}

std::string disassembleWords(const isa::Word* words, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    std::array<char, 48> head{};
    (void)std::snprintf(head.data(), head.size(), "%5zu  %016llx  ", i,
                        static_cast<unsigned long long>(words[i]));
    text += head.data() + isa::disassemble(words[i], isa::Fields::All) + "\n";
  }
  return text;
}

}  // namespace qpu::runtime
