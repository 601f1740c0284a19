// Packs candidates into one instruction. An instruction can use the ADD pipe, the MUL pipe and
// further units.
#ifndef QPU_SRC_COMPILER_SCHEDULE_BUNDLE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_BUNDLE_HPP

#include <array>
#include <cstddef>
#include <cstdint>

#include "compiler/schedule_copies.hpp"

namespace qpu::compiler {

class Bundler {
 public:
  Bundler(const BlockState& state, Planner& planner, const FileChooser& files, const CopyPlanner& copies,
          const CandidateList& candidates)
      : state_(state), planner_(planner), files_(files), copies_(copies), candidates_(candidates) {}

  // Returns the best bundle of candidates, or an empty bundle if no candidate can issue. The
  // bundle is valid until the list of candidates changes.
  Bundle choose();
  // Returns a bundle that contains only the first candidate that can issue.
  Bundle chooseFirst() const;

 private:
  bool fits(const Bundle& bundle, const Candidate& candidate) const;
  bool resourcesFit(const Bundle& bundle, const Candidate& candidate) const;
  bool resultFits(const Bundle& bundle, const Candidate& candidate) const;
  bool isTargetFree(const Bundle& bundle, const Candidate& candidate) const;
  bool moveSameValue(const Candidate& copy, const Candidate& other) const;
  Bundle fill(std::size_t first);
  void addFollower(Bundle& bundle);
  void vacateR5(Bundle& bundle);
  int scoreOf(const Bundle& bundle) const;

  const BlockState& state_;
  Planner& planner_;
  const FileChooser& files_;
  const CopyPlanner& copies_;
  const CandidateList& candidates_;
  static constexpr std::size_t kMostFollowers = 8;
  std::array<Candidate, kMostFollowers> followers_;  // candidates that can join a bundle but cannot issue alone
  std::size_t followerCount_ = 0;
  bool ignoresPreference_ = false;  // if true, results that prefer an accumulator may be placed in a file
};

}  // namespace qpu::compiler

#endif
