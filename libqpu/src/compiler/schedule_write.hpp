// Writes a bundle as one machine instruction, and updates the scheduler's record of which registers
// hold the values.
#ifndef QPU_SRC_COMPILER_SCHEDULE_WRITE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_WRITE_HPP

#include <cstdint>

#include "compiler/schedule_files.hpp"

namespace qpu::compiler {

class InstructionWriter {
 public:
  InstructionWriter(BlockState& state, FileChooser& files) : state_(state), files_(files) {}

  Slot write(const Bundle& bundle);
  // Returns the registers in files A and B that the last instruction wrote, as a bit mask indexed
  // by Place.
  std::uint64_t lastWritten() const { return lastWritten_; }

 private:
  void readOperands(const Candidate& candidate);
  std::uint8_t writeResult(const Candidate& candidate, std::uint8_t file);
  static std::uint8_t addressOf(Place p);
  void writePipe(isa::Instruction& instruction, const Candidate& candidate, bool inAdd, std::uint8_t target) const;
  void putCopy(std::uint32_t v, Place p, const Candidate& candidate);
  void putMain(std::uint32_t v, Place p, const Candidate& candidate);
  void putFixed(std::uint32_t v, Place p, int latency);

  BlockState& state_;
  FileChooser& files_;
  std::uint64_t lastWritten_ = 0;
};

}  // namespace qpu::compiler

#endif
