// Compiled kernels as files.
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

// Reads the output of saveObject(), or 8-byte words in little-endian order. Throws ArgumentError.
// `name` is used in its message, and for programs without a name.
code::Object readObject(std::string_view data, const std::string& name);
code::Object openObject(const std::string& path);

// Creates a program that is not a kernel: the caller supplies all of its uniforms.
code::Object objectOf(const isa::Word* words, std::size_t count, const std::string& name);

// Assembles lines. '#' starts a comment; blank lines are ignored. Throws ArgumentError; its
// message contains the line number.
std::vector<isa::Word> assembleLines(std::string_view text);
// One line per word: its number, the word, and text that assembles to the word.
std::string disassembleWords(const isa::Word* words, std::size_t count);

}  // namespace qpu::runtime

#endif
