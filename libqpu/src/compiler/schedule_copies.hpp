// Copies of values between registers. A copy moves a value to a register from which an operation
// can read it, or out of a register that another value needs.
#ifndef QPU_SRC_COMPILER_SCHEDULE_COPIES_HPP
#define QPU_SRC_COMPILER_SCHEDULE_COPIES_HPP

#include <cstdint>

#include "compiler/schedule_files.hpp"

namespace qpu::compiler {

class CopyPlanner {
 public:
  CopyPlanner(BlockState& state, const Planner& planner, const FileChooser& files, CandidateList& candidates)
      : state_(state), planner_(planner), files_(files), candidates_(candidates) {}

  // Adds candidates for the copies that operations have requested.
  void addRequested();
  // Adds a candidate that moves the current value out of r4, unless the last use of that value is
  // near. Call this function if another result, whose priority is `priority`, is waiting for r4.
  void evictR4(std::int32_t priority);
  // Adds candidates that move the values out of r4 and r5.
  void evictR4AndR5();
  // Plans a copy that moves the value out of r5 if the value blocks the next broadcast, has many
  // remaining reads, and is read only by the ADD pipe. Returns false if no copy was planned.
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
