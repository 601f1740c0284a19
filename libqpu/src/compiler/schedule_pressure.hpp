// Register pressure of a block while it is scheduled.
//
// The scheduler always has a fallback schedule that fits into the registers: the remaining
// operations in source order. An operation may issue out of order only if the fallback schedule
// still fits afterwards. This technique follows James R. Goodman and Wei-Chung Hsu, "Code
// Scheduling and Register Allocation in Large Basic Blocks", 1988.
#ifndef QPU_SRC_COMPILER_SCHEDULE_PRESSURE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_PRESSURE_HPP

#include <cstdint>
#include <vector>

#include "compiler/schedule_graph.hpp"

namespace qpu::compiler {

class PressureTracker {
 public:
  // poolA and poolB are the registers of each file that any value of the block may use.
  PressureTracker(const Graph& graph, std::uint32_t poolA, std::uint32_t poolB);

  // Returns true if the value occupies a register in the pools.
  bool isCounted(std::uint32_t value) const { return isCounted_[value] != 0; }

  // Records that a register from the pools holds a value whose home register is outside the
  // pools.
  void count(std::uint32_t value, std::uint32_t oldest) {
    isCounted_[value] = 1;
    add(oldest, lastUse_[value], 1);
  }
  // Records that the last use of the value has issued.
  void release(std::uint32_t value, std::uint32_t oldest) {
    if (isCounted(value)) add(oldest, lastUse_[value], -1);
  }
  // Records that the operation that defines a counted value has issued. The value becomes live
  // earlier than in source order.
  void define(std::uint32_t node, std::uint32_t oldest) { add(oldest, node, 1); }

  // Returns true if one more value can be live from operation `oldest` up to, but not including,
  // operation `node`.
  bool hasRoom(std::uint32_t oldest, std::uint32_t node) const;

 private:
  void add(std::uint32_t from, std::uint32_t to, std::int16_t by) {
    for (std::uint32_t k = from; k < to; ++k) live_[k] = static_cast<std::int16_t>(live_[k] + by);
  }

  std::vector<std::int16_t> live_;      // indexed by operation: counted values live after the operation in source order
  std::vector<char> isCounted_;         // indexed by value
  std::vector<std::uint32_t> lastUse_;  // indexed by value: the last operation that uses the value
  std::int16_t capacity_ = 0;
};

}  // namespace qpu::compiler

#endif
