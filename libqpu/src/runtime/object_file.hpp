// Saves compiled kernels to files, and reads such files.
#ifndef QPU_SRC_RUNTIME_OBJECT_FILE_HPP
#define QPU_SRC_RUNTIME_OBJECT_FILE_HPP

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "code/object.hpp"

namespace qpu::runtime {

// Throws ArgumentError if the file cannot be written.
void saveObject(const code::Object& object, const std::string& path);

// Converts the contents of a file to an object. The file must have been written by saveObject(), or
// must consist of 8-byte words in little-endian order. Throws ArgumentError for any other contents.
// `name` is used in the error message, and as the name of a program that has no other name.
code::Object readObject(std::string_view data, const std::string& name);
code::Object openObject(const std::string& path);

// Creates a program that is not a kernel. The caller supplies all of its uniforms.
code::Object objectOf(const isa::Word* words, std::size_t count, const std::string& name);

// Assembles several lines of text. '#' starts a comment, and blank lines are ignored. Throws
// ArgumentError with a message that contains the line number.
std::vector<isa::Word> assembleLines(std::string_view text);
// Returns one line per word. Each line contains the word's number, the word itself, and text that
// can be assembled to this word.
std::string disassembleWords(const isa::Word* words, std::size_t count);

}  // namespace qpu::runtime

#endif
