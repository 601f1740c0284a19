// Instructions from the operations of one block: order, pairs and registers are
// chosen together, instruction by instruction, so that ports, hazards and places
// are known exactly when two operations are put into one.
#ifndef QPU_SRC_COMPILER_SCHEDULE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_HPP

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/schedule_graph.hpp"

namespace qpu::compiler {

struct Slot {
  isa::Instruction instruction;
  std::uint32_t site = code::Object::kNoSite;
};

struct ScheduledBlock {
  std::vector<Slot> slots;
  int flagsAt = -1;               // the instruction that sets the flags of the exit
  int minimumLength = 0;                // instructions that the block must have at least
  std::uint64_t lastWritten = 0;  // registers of the files that the last one writes, by Place
};

struct ScheduleOptions {
  int fileRegisters = 32;
  bool pair = true;
  // Operations this far behind the oldest one that is left are not looked at.
  // With 1 the order is that of the operations.
  std::uint32_t window = 1;
  // AfterRequests: a result of a TMU is received after the requests that come before it in the source, so that as many
  // stay in flight. Spread: the last receive of the block comes after all operations that depend on no receive, with a
  // gap to the receive before it. Both are priorities: they end where no other operation can go.
  enum class Receives : std::uint8_t { Early, AfterRequests, Spread };
  Receives receives = Receives::Early;
  // The QPU waits for a DMA only when no other operation can go.
  bool lateWaits = false;
  // Vectors that are read from the VPM go to file A and file B in turn.
  bool alternateFiles = false;
  std::uint64_t occupied = 0;    // registers that hold a vector at the start
  std::uint64_t reserved = 0;    // homes of the vectors that must be there in the end
  std::uint64_t unreadable = 0;  // registers that the first instruction cannot read yet
};

// Nothing when the registers did not suffice for the order that was chosen.
std::optional<ScheduledBlock> schedule(const Graph& graph, const ScheduleOptions& options);

}  // namespace qpu::compiler

#endif
