// The file format of objects, which is the same on every machine.
//
//   0   8  magic
//   8   4  version of the format
//   12  4  bytes of the content
//   16  8  FNV-1a (64 bit) of bytes 0..15 and of the content
//   24     content
//
// Numbers are little-endian. Strings are UTF-8. Strings and lists start with their 32-bit length.
#ifndef QPU_SRC_CODE_SERIALISE_HPP
#define QPU_SRC_CODE_SERIALISE_HPP

#include <optional>
#include <string>
#include <string_view>

#include "code/object.hpp"

namespace qpu::code {

// Bytes that are not valid UTF-8 become U+FFFD in strings. Throws std::length_error if the object
// is larger than 4 GB.
std::string save(const Object& object);

// Returns nothing if the data is incomplete, damaged, in another format or version, or not a
// valid object. In a valid object every word has a site number or kNoSite, all sites and
// arguments exist, and the spill area consists of whole lines.
std::optional<Object> load(std::string_view data);

// Whether `data` starts like a file of this format, valid or not.
bool looksSaved(std::string_view data);

// Adds the header to the content.
std::string seal(std::string_view content);

}  // namespace qpu::code

#endif
