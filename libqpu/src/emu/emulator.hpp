// Runs encoded programs on an emulated VideoCore IV: bit exact where the
// arithmetic is known, checked (a program that breaks a rule of the hardware is
// an error), and timed by a model. One host thread; a run depends on its inputs
// alone.
#ifndef QPU_SRC_EMU_EMULATOR_HPP
#define QPU_SRC_EMU_EMULATOR_HPP

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "emu/board.hpp"

namespace qpu::emu {

// Memory that the programs may touch.
struct Region {
  std::uint32_t start = 0;  // bus address
  std::uint32_t bytes = 0;
  unsigned char* host = nullptr;
};

// A program whose every rule that needs no running has been checked. Launches at
// once may share one.
struct Program;
std::shared_ptr<const Program> prepare(const isa::Word* words, std::size_t count,
                                       std::uint32_t codeAddress);

struct Launch {
  const isa::Word* words = nullptr;
  std::size_t count = 0;
  std::uint32_t codeAddress = 0;  // bus address of the first word, for absolute branches
  // The same prepared, when that was done before; else null.
  const Program* program = nullptr;
  // The uniform stream of each QPU; their number is the number of QPUs, 1..12.
  std::vector<std::vector<std::uint32_t>> uniforms;
  // Sorted by start, not overlapping.
  std::vector<Region> memory;
  // For error texts; may be null.
  const code::Object* object = nullptr;
  const Board* board = nullptr;  // null: kDefaultBoard
  bool profile = false;          // fill Report::instructions
  // More instructions than this on one QPU is an error ("does not end"); 0: no limit.
  std::uint64_t limit = 0;
  // The same for clocks of the model.
  std::uint64_t clockLimit = 0;
  // What published programs do and hardware may take, but no document promises, is a
  // warning of the report and not an error.
  bool lenient = false;
};

// Counters are of all QPUs together; clocks are the model's.
struct InstructionProfile {
  std::uint64_t executed = 0;
  std::uint64_t stalled = 0;  // clocks
};

struct Report {
  std::uint64_t instructions = 0;
  std::uint64_t clocks = 0;      // from start to the end of the last QPU; model
  std::uint64_t stalledOnTmu = 0;
  std::uint64_t stalledOnVpm = 0;     // and its DMA
  std::uint64_t stalledOnOther = 0;   // uniforms, semaphores, mutex, instruction fetch
  std::uint64_t tmuBytes = 0;         // words delivered to QPUs
  std::uint64_t memoryReadBytes = 0;  // what crossed the bus
  std::uint64_t memoryWriteBytes = 0;
  bool hostInterrupt = false;
  std::vector<InstructionProfile> perInstruction;  // with Launch::profile
  std::vector<std::string> warnings;               // with Launch::lenient; one per instruction

  double seconds(const Board& board) const;  // model
};

// Throws ExecutionError, BoundsError, DeadlockError; texts name the QPU, the
// instruction with its listing, and the construct of the source where known.
Report run(const Launch& launch);

}  // namespace qpu::emu

#endif
