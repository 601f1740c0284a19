// Compiled kernels as files of their own.
#ifndef QPU_SRC_RUNTIME_OBJECT_FILE_HPP
#define QPU_SRC_RUNTIME_OBJECT_FILE_HPP

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "code/object.hpp"

namespace qpu::runtime {

// Throws ArgumentError when the file cannot be written.
void saveObject(const code::Object& object, const std::string& path);

// What saveObject() wrote, else words of 8 bytes, low byte first. Throws
// ArgumentError; `name` is for its text and for programs that have none.
code::Object readObject(std::string_view data, const std::string& name);
code::Object openObject(const std::string& path);

// A program without a kernel around it: all of its uniforms are the caller's.
code::Object objectOf(const isa::Word* words, std::size_t count, const std::string& name);

// Lines of assembly with comments from '#' on and blank lines. Throws ArgumentError
// with the number of the line.
std::vector<isa::Word> assembleLines(std::string_view text);
// One line per word: number, word, text that assembles to the word.
std::string disassembleWords(const isa::Word* words, std::size_t count);

}  // namespace qpu::runtime

#endif
