// Runs machine code on an emulated VideoCore IV. The emulation is bit-exact where the arithmetic
// is known, checks programs (breaking a hardware rule is an error), and computes times from a
// model. It uses one host thread, and a run depends only on its inputs.
#ifndef QPU_SRC_EMU_EMULATOR_HPP
#define QPU_SRC_EMU_EMULATOR_HPP

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "emu/board.hpp"

namespace qpu::emu {

// Memory that programs can access.
struct Region {
  std::uint32_t start = 0;  // bus address
  std::uint32_t bytes = 0;
  unsigned char* host = nullptr;
};

// A program whose static rules have been checked. Concurrent launches can share it.
struct Program;
std::shared_ptr<const Program> prepare(const isa::Word* words, std::size_t count,
                                       std::uint32_t codeAddress);

struct Launch {
  const isa::Word* words = nullptr;
  std::size_t count = 0;
  std::uint32_t codeAddress = 0;  // bus address of the first word, for absolute branches
  // the result of prepare() for the same words, or null
  const Program* program = nullptr;
  // The uniform stream of each QPU. The number of streams (1..12) is the number of QPUs.
  std::vector<std::vector<std::uint32_t>> uniforms;
  // Sorted by start, without overlaps.
  std::vector<Region> memory;
  // For error messages; can be null.
  const code::Object* object = nullptr;
  const Board* board = nullptr;  // null: kDefaultBoard
  bool profile = false;          // fill Report::perInstruction
  // Maximum number of instructions per QPU; exceeding it is an error. 0: no limit.
  std::uint64_t limit = 0;
  // Maximum number of clocks in the model; exceeding it is an error. 0: no limit.
  std::uint64_t clockLimit = 0;
  // Report undocumented constructs that published programs use and hardware probably supports as
  // warnings, not errors.
  bool lenient = false;
};

// Counters are sums over all QPUs. Clocks are the model's.
struct InstructionProfile {
  std::uint64_t executed = 0;
  std::uint64_t stalled = 0;  // clocks
};

struct Report {
  std::uint64_t instructions = 0;
  std::uint64_t clocks = 0;      // from the start until the last QPU has finished; model
  std::uint64_t stalledOnTmu = 0;
  std::uint64_t stalledOnVpm = 0;     // including its DMA
  std::uint64_t stalledOnOther = 0;   // uniforms, semaphores, mutex, instruction fetch
  std::uint64_t tmuBytes = 0;         // words delivered to QPUs
  std::uint64_t memoryReadBytes = 0;  // transferred over the bus
  std::uint64_t memoryWriteBytes = 0;
  bool hostInterrupt = false;
  std::vector<InstructionProfile> perInstruction;  // with Launch::profile
  std::vector<std::string> warnings;               // with Launch::lenient; one per instruction

  double seconds(const Board& board) const;  // model
};

// Throws ExecutionError, BoundsError or DeadlockError. Messages contain the QPU, the
// disassembled instruction and, if known, the construct of the source.
Report run(const Launch& launch);

}  // namespace qpu::emu

#endif
