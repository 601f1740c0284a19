// When results of the TMUs are received. A receive stalls the QPU until the result is there.
#ifndef QPU_SRC_COMPILER_SCHEDULE_RECEIVES_HPP
#define QPU_SRC_COMPILER_SCHEDULE_RECEIVES_HPP

#include <cstdint>
#include <vector>

#include "compiler/schedule_state.hpp"

namespace qpu::compiler {

class ReceiveTiming {
 public:
  explicit ReceiveTiming(const BlockState& state);

  // Whether the operation, which may stall the QPU, is delayed until no other operation can issue.
  bool isDelayed(std::uint32_t n);
  // Whether the gap before the last receive of the block has not ended yet.
  bool isInGap() const;
  // Called when the operation issues in the current cycle.
  void issue(std::uint32_t n);

 private:
  bool isLastOfSpread() const {
    return state_.options.receives == ScheduleOptions::Receives::Spread && receives_ == 1;
  }

  const BlockState& state_;
  std::vector<bool> dependsOnReceive_;  // indexed by operation
  std::uint32_t independent_ = 0;       // remaining operations that depend on no receive
  std::uint32_t receives_ = 0;          // remaining receives
  std::uint32_t firstRequest_ = 0;      // lower bound of the first remaining request
  std::int32_t gapEnd_ = 0;             // first cycle in which the last receive can issue
};

}  // namespace qpu::compiler

#endif
