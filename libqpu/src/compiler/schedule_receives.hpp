// Determines when TMU results are received. A receive stalls the QPU until the result is
// available.
#ifndef QPU_SRC_COMPILER_SCHEDULE_RECEIVES_HPP
#define QPU_SRC_COMPILER_SCHEDULE_RECEIVES_HPP

#include <cstdint>
#include <vector>

#include "compiler/schedule_state.hpp"

namespace qpu::compiler {

class ReceiveTiming {
 public:
  explicit ReceiveTiming(const BlockState& state);

  // Whether the operation, which may stall the QPU, is delayed until other operations can no
  // longer issue.
  bool isDelayed(std::uint32_t n);
  // Whether the gap before the block's last receive is still in progress.
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
