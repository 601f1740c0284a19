// Runs machine code on an emulated VideoCore IV. The emulation is bit-exact where the hardware's
// arithmetic is known. The emulator reports an error if a program breaks a hardware rule. Times
// come from a cycle model. A launch uses one host thread, and its results depend only on its
// inputs.
#ifndef QPU_SRC_EMU_EMULATOR_HPP
#define QPU_SRC_EMU_EMULATOR_HPP

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "emu/board.hpp"

namespace qpu::emu {

// A memory region that programs can access.
struct Region {
  std::uint32_t start = 0;  // bus address
  std::uint32_t bytes = 0;
  unsigned char* host = nullptr;
};

// A program whose static rules have been checked. Launches that run at the same time can share the
// program.
struct Program;
std::shared_ptr<const Program> prepare(const isa::Word* words, std::size_t count,
                                       std::uint32_t codeAddress);

struct Launch {
  const isa::Word* words = nullptr;
  std::size_t count = 0;
  std::uint32_t codeAddress = 0;  // bus address of the first word; required for absolute branches
  // The result of prepare() for the same words, or null.
  const Program* program = nullptr;
  // The uniform streams of the QPUs, one for each QPU. The launch uses as many QPUs (1..12) as
  // there are streams.
  std::vector<std::vector<std::uint32_t>> uniforms;
  // The regions must be sorted by their start and must not overlap.
  std::vector<Region> memory;
  // The object from which the words were taken. It is used for error messages and can be null.
  const code::Object* object = nullptr;
  const Board* board = nullptr;  // null means kDefaultBoard
  bool profile = false;          // if true, fills Report::perInstruction
  // The maximum number of instructions that a QPU may execute. If a QPU executes more, the run
  // fails. 0 means no limit.
  std::uint64_t limit = 0;
  // The number of clocks in the model after which the run fails. 0 means no limit.
  std::uint64_t clockLimit = 0;
  // If true, undocumented constructs that published programs use, and that the hardware probably
  // supports, are reported as warnings instead of errors.
  bool lenient = false;
};

// Counters are sums over all QPUs. All times are clocks of the model.
struct InstructionProfile {
  std::uint64_t executed = 0;
  std::uint64_t stalled = 0;  // stall time in clocks
};

struct Report {
  std::uint64_t instructions = 0;
  std::uint64_t clocks = 0;  // time in the model, from the start until the last QPU has finished
  std::uint64_t stalledOnTmu = 0;
  std::uint64_t stalledOnVpm = 0;     // waits for the VPM and for DMA
  // Waits for uniforms, semaphores, the mutex and instruction fetch.
  std::uint64_t stalledOnOther = 0;
  std::uint64_t tmuBytes = 0;         // size of the words that the TMUs delivered to the QPUs
  std::uint64_t memoryReadBytes = 0;  // size of the data that was transferred over the bus
  std::uint64_t memoryWriteBytes = 0;
  bool hostInterrupt = false;
  std::vector<InstructionProfile> perInstruction;  // filled if Launch::profile is true
  // Filled if Launch::lenient is true. An instruction causes at most one warning.
  std::vector<std::string> warnings;

  double seconds(const Board& board) const;  // time according to the model
};

// Throws ExecutionError, BoundsError or DeadlockError. Messages contain the QPU's number, the
// disassembled instruction and, if known, the source construct.
Report run(const Launch& launch);

}  // namespace qpu::emu

#endif
