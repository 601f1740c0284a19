// SHA-256 (FIPS 180-4), for names that are derived from a file's contents.
#ifndef QPU_SRC_RUNTIME_SHA256_HPP
#define QPU_SRC_RUNTIME_SHA256_HPP

#include <string>
#include <string_view>

namespace qpu::runtime {

// Returns 64 lower-case hexadecimal digits.
std::string sha256(std::string_view data);

}  // namespace qpu::runtime

#endif
