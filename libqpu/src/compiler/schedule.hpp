// List scheduling of a basic block. The priority of an operation is the length of its critical
// path. Reference: Philip B. Gibbons and Steven S. Muchnick, "Efficient Instruction Scheduling for
// a Pipelined Architecture", 1986.
//
// The scheduler chooses the order, the pairs of operations and the registers in one pass, one
// instruction at a time. A single pass is necessary because two operations can issue together only
// if their registers and ports are compatible. The order is also limited by register pressure (see
// schedule_pressure.hpp).
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
  int flagsAt = -1;               // index of the instruction that sets the flags for the branch
  int minimumLength = 0;                // the required minimum length of the block, in instructions
  std::uint64_t lastWritten = 0;  // registers that the last instruction writes, as a bit mask indexed by Place
};

struct ScheduleOptions {
  int fileRegisters = 32;
  bool pair = true;
  // The scheduler considers only this many operations, starting with the first one that has not
  // issued. With a window of 1, operations issue in source order.
  std::uint32_t window = 1;
  // AfterRequests: a TMU result is received only after the requests that precede the receive in
  // source order, so that the number of requests in flight does not decrease. Spread: the block's
  // last receive issues after all operations that do not depend on a receive, and a gap separates
  // this receive from the previous receive. The scheduler ignores both rules if no other operation
  // can issue.
  enum class Receives : std::uint8_t { Early, AfterRequests, Spread };
  Receives receives = Receives::Early;
  // An operation that waits for a DMA transfer issues only if no other operation can issue.
  bool lateWaits = false;
  // Vectors that are read from the VPM are placed in files A and B alternately.
  bool alternateFiles = false;
  // Bit masks of registers, indexed by Place.
  std::uint64_t occupied = 0;    // registers that hold live-in vectors
  std::uint64_t reserved = 0;    // home registers of live-out vectors
  std::uint64_t unreadable = 0;  // registers that the first instruction cannot read yet
};

// Returns std::nullopt if there are not enough registers for the chosen order.
std::optional<ScheduledBlock> schedule(const Graph& graph, const ScheduleOptions& options);

}  // namespace qpu::compiler

#endif
