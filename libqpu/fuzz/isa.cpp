// Fuzzes the decoder, the disassembler and the verifier with arbitrary words. No word may cause a
// crash. Encoding a decoded word or assembling a disassembled word must produce the original word.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "fuzz/check.hpp"
#include "isa/instruction.hpp"
#include "isa/text.hpp"
#include "isa/verify.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<qpu::isa::Word> program(size / sizeof(qpu::isa::Word));
  if (!program.empty()) std::memcpy(program.data(), data, program.size() * sizeof program[0]);
  for (const qpu::isa::Word word : program) {
    if (const auto instruction = qpu::isa::decode(word)) {
      check(qpu::isa::encode(*instruction) == word);
      check(qpu::isa::decode(qpu::isa::encode(*instruction)) == instruction);
    }
    check(qpu::isa::assemble(qpu::isa::disassemble(word, qpu::isa::Fields::All)) == word);
    const std::string line = qpu::isa::disassemble(word);
    check((line.rfind(".word", 0) == 0) != qpu::isa::decode(word).has_value());
    check(qpu::isa::disassemble(qpu::isa::assemble(line)) == line);
  }
  std::size_t before = 0;
  for (const qpu::isa::Fault& f : qpu::isa::verify(program)) {
    check(f.instruction >= before && f.cause <= program.size());
    check(f.instruction < program.size() || program.empty());
    before = f.instruction;
  }
  return 0;
}
