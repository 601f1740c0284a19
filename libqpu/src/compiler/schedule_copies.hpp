// Copies of values between registers: to where an operation can read them, and out of registers that others need.
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
  // Another result of this priority waits for r4: adds a candidate that moves the current one away, unless it is used
  // up soon.
  void evictR4(std::int32_t priority);
  // Adds candidates that move the values in r4 and r5 away.
  void evictR4AndR5();
  // A move out of r5, if only the ADD pipe reads the value often and would block the next broadcast.
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
