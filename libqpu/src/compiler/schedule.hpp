// List scheduling of one basic block, with the critical path as priority: Philip B. Gibbons and Steven S. Muchnick,
// "Efficient Instruction Scheduling for a Pipelined Architecture", 1986.
//
// Order, pairing and registers are chosen in one pass, instruction by instruction: two operations can issue together
// only if their registers and ports fit. Register pressure limits the order (see schedule_pressure.hpp).
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
  int flagsAt = -1;               // the instruction that sets the flags for the branch
  int minimumLength = 0;                // in instructions
  std::uint64_t lastWritten = 0;  // registers that the last instruction writes, as bits by Place
};

struct ScheduleOptions {
  int fileRegisters = 32;
  bool pair = true;
  // Only this many operations from the first one that has not issued are considered. With 1 the order is the source
  // order.
  std::uint32_t window = 1;
  // AfterRequests: a result of a TMU is received after the requests that precede it in source order, so that the number
  // of requests in flight does not fall. Spread: the last receive of the block issues after all operations that depend
  // on no receive, with a gap to the receive before it. Both yield if no other operation can issue.
  enum class Receives : std::uint8_t { Early, AfterRequests, Spread };
  Receives receives = Receives::Early;
  // The QPU waits for a DMA only if no other operation can issue.
  bool lateWaits = false;
  // Vectors that are read from the VPM go to files A and B alternately.
  bool alternateFiles = false;
  // Registers as bits by Place.
  std::uint64_t occupied = 0;    // registers that hold live-in vectors
  std::uint64_t reserved = 0;    // home registers of live-out vectors
  std::uint64_t unreadable = 0;  // registers that the first instruction cannot read yet
};

// Returns nothing if there are not enough registers for the chosen order.
std::optional<ScheduledBlock> schedule(const Graph& graph, const ScheduleOptions& options);

}  // namespace qpu::compiler

#endif
