// The file format of objects, which is the same on every machine:
//
//   offset  bytes  content
//   0       8      magic string
//   8       4      version of the format
//   12      4      size of the object in bytes
//   16      8      FNV-1a hash (64 bits) of bytes 0..15 and of the object
//   24      ...    the object
//
// Numbers are little-endian. Strings are encoded in UTF-8. Each string and each list starts with
// its length as a 32-bit number.
#ifndef QPU_SRC_CODE_SERIALISE_HPP
#define QPU_SRC_CODE_SERIALISE_HPP

#include <optional>
#include <string>
#include <string_view>

#include "code/object.hpp"

namespace qpu::code {

// In strings, bytes that are not valid UTF-8 become U+FFFD. Throws std::length_error if the
// object is larger than 4 GB.
std::string save(const Object& object);

// Returns std::nullopt if the data is incomplete, is damaged, has another format or version, or
// contains an invalid object. In a valid object, every word has a site number or kNoSite, and all
// sites and arguments exist. The size of the spill area is a multiple of 64 bytes.
std::optional<Object> load(std::string_view data);

// Returns true if `data` starts with the magic string. The rest of the data need not be
// valid.
bool looksSaved(std::string_view data);

// Adds the header to the serialised object.
std::string seal(std::string_view content);

}  // namespace qpu::code

#endif
