// Fuzzes the assembler with arbitrary text. The assembler must either reject a line or produce a
// word whose listing assembles to the same word.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "fuzz/check.hpp"
#include "isa/text.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string line(data, data + size);
  try {
    const qpu::isa::Word word = qpu::isa::assemble(line);
    check(qpu::isa::assemble(qpu::isa::disassemble(word, qpu::isa::Fields::All)) == word);
  } catch (const std::invalid_argument& e) {
    check(std::string(e.what()).rfind("column ", 0) == 0);
  }
  return 0;
}
