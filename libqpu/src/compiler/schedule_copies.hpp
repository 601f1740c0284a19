// Copies of values between registers: to registers from which an operation can read them, and out of registers that
// other values need.
#ifndef QPU_SRC_COMPILER_SCHEDULE_COPIES_HPP
#define QPU_SRC_COMPILER_SCHEDULE_COPIES_HPP

#include <cstdint>

#include "compiler/schedule_files.hpp"

namespace qpu::compiler {

class CopyPlanner {
 public:
  CopyPlanner(BlockState& state, const Planner& planner, const FileChooser& files, CandidateList& candidates)
      : state_(state), planner_(planner), files_(files), candidates_(candidates) {}

  // Adds candidates for the copies that operations requested.
  void addRequested();
  // Adds a candidate that moves the current value out of r4, unless its last use is near. Called
  // if another result with this priority is waiting for r4.
  void evictR4(std::int32_t priority);
  // Adds candidates that move the values in r4 and r5 away.
  void evictR4AndR5();
  // Plans to move the value out of r5 if it blocks the next broadcast, has many reads left and is
  // read only by the ADD pipe. Otherwise returns false.
  bool planVacateR5(Candidate& candidate) const;

 private:
  void evictAccumulator(const CopyRequest& request);

  BlockState& state_;
  const Planner& planner_;
  const FileChooser& files_;
  CandidateList& candidates_;
};

}  // namespace qpu::compiler

#endif
