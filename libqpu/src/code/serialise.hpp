// Objects as bytes, for files: the same on every machine.
//
//   0   8  magic
//   8   4  version of the format
//   12  4  bytes of the content
//   16  8  FNV-1a (64 bit) of bytes 0..15 and of the content
//   24     content
//
// Numbers are little-endian; texts, in UTF-8, and lists start with their 32-bit length.
#ifndef QPU_SRC_CODE_SERIALISE_HPP
#define QPU_SRC_CODE_SERIALISE_HPP

#include <optional>
#include <string>
#include <string_view>

#include "code/object.hpp"

namespace qpu::code {

// Bytes of a text that are no UTF-8 become U+FFFD. Throws std::length_error for an object
// beyond 4 GB.
std::string save(const Object& object);

// Nothing for data that is torn, truncated, foreign, of another version, or no
// sound object: whatever comes out has a site number or kNoSite for every word,
// sites and arguments that exist, and a spill area of whole lines.
std::optional<Object> load(std::string_view data);

// Whether `data` starts like something save() wrote, sound or not.
bool looksSaved(std::string_view data);

// Header and content; save() is this around what it knows of the object.
std::string seal(std::string_view content);

}  // namespace qpu::code

#endif
