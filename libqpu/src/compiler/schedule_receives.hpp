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

  // Returns true if operation n, which may stall the QPU, must wait until no other operation can
  // issue.
  bool isDelayed(std::uint32_t n);
  // Returns true if the current cycle is in the gap before the block's last receive.
  bool isInGap() const;
  // Records that operation n issues in the current cycle.
  void issue(std::uint32_t n);

 private:
  bool isLastOfSpread() const {
    return state_.options.receives == ScheduleOptions::Receives::Spread && receives_ == 1;
  }

  const BlockState& state_;
  std::vector<bool> dependsOnReceive_;  // indexed by operation
  std::uint32_t independent_ = 0;       // remaining operations that do not depend on a receive
  std::uint32_t receives_ = 0;          // remaining receives
  // Lower bound for the index of the first remaining request.
  std::uint32_t firstRequest_ = 0;
  std::int32_t gapEnd_ = 0;             // first cycle in which the last receive can issue
};

}  // namespace qpu::compiler

#endif
