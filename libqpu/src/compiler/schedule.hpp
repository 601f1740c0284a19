// List scheduling of one basic block, with the critical path as priority: Philip B. Gibbons and Steven S. Muchnick,
// "Efficient Instruction Scheduling for a Pipelined Architecture", 1986.
//
// Order, pairing and registers are chosen in one pass, instruction by instruction, because two
// operations can issue together only if their registers and ports are compatible. Register
// pressure limits the order (see schedule_pressure.hpp).
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
  // Only this many operations are considered, starting with the first one that has not issued.
  // With 1, the order is the source order.
  std::uint32_t window = 1;
  // AfterRequests: a TMU result is received after the requests that precede it in source order,
  // so that the number of requests in flight does not fall. Spread: the block's last receive
  // issues after all operations that do not depend on a receive, with a gap after the previous
  // receive. Both rules are dropped if no other operation can issue.
  enum class Receives : std::uint8_t { Early, AfterRequests, Spread };
  Receives receives = Receives::Early;
  // A wait for a DMA transfer issues only if no other operation can.
  bool lateWaits = false;
  // Vectors read from the VPM go alternately to files A and B.
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
