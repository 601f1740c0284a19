// Candidates for the next instruction. A candidate is an operation or a copy, together with the
// resources that it needs in an instruction.
#ifndef QPU_SRC_COMPILER_SCHEDULE_CANDIDATE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_CANDIDATE_HPP

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "compiler/schedule_state.hpp"

namespace qpu::compiler {

// An operation, or a copy of a value to another register, in the form in which it can issue in
// the current cycle.
struct Candidate {
  std::uint32_t node = kNone;     // the operation, or kNone for a copy
  std::uint32_t value = kNone;    // the value that is copied or moved by a copy
  std::uint32_t copyFor = kNone;  // the operation that needs the copy
  bool relocates = false;         // if true, the value does not stay in its old register
  std::uint8_t pipes = 0;
  std::uint8_t portA = isa::address::kNop;
  std::uint8_t portB = isa::address::kNop;
  std::int16_t small = -1;        // small-immediate code
  isa::Mux a = isa::Mux::R0, b = isa::Mux::R0;
  std::uint8_t exclusive = 0;
  bool setsFlags = false;
  bool fillsInstruction = false;
  bool takesR4 = false, takesR5 = false;
  Place fixed = kNowhere;            // the register to write, if there is only one possibility
  std::uint8_t files = kToNeither;   // the files to which the result can go
  bool choosesPlace = false;
  bool prefersAccumulator = false;
  std::array<std::uint32_t, 2> reads{kNone, kNone};  // the values that the candidate reads
  std::int32_t priority = 0;

  bool isCopy() const { return node == kNone; }
};

// Returns true if x can issue in the ADD pipe while y issues in the MUL pipe.
inline bool inAddAndMul(const Candidate& x, const Candidate& y) {
  return (x.pipes & kAddPipe) != 0 && (y.pipes & kMulPipe) != 0 && !y.setsFlags;
}

inline std::uint8_t fileOf(Place p) { return isFileA(p) ? kToA : isFileB(p) ? kToB : kToNeither; }

// A list of candidates in order of decreasing priority.
class CandidateList {
 public:
  void clear() { list_.clear(); }
  void add(const Candidate& candidate);
  std::size_t size() const { return list_.size(); }
  bool empty() const { return list_.empty(); }
  const Candidate& operator[](std::size_t i) const { return list_[i]; }
  const Candidate& front() const { return list_.front(); }

 private:
  std::vector<Candidate> list_;
};

// A request to copy a value to a register from which an operation can read it.
struct CopyRequest {
  std::uint32_t value = kNone;
  std::uint32_t node = kNone;
  std::uint8_t allowed = 0;  // a combination of kToA, kToB and kToNeither (an accumulator)
  std::int32_t priority = 0;
};

// Determines the resources that operations and copies need.
class Planner {
 public:
  explicit Planner(const BlockState& state) : state_(state) {}

  // Determines the resources that operation n needs. Returns false if the operation cannot issue
  // now. If the operation needs a value that is in an unsuitable register, requests a copy of the
  // value.
  bool planNode(std::uint32_t n, Candidate& candidate);
  // Plans a copy of value v to one of the `allowed` files for operation `node`. Returns false if
  // v cannot be read now.
  bool planCopy(std::uint32_t v, bool relocates, std::uint8_t allowed, std::uint32_t node, std::int32_t priority,
                Candidate& candidate) const;

  const std::vector<CopyRequest>& requests() const { return requests_; }
  void clearRequests() { requests_.clear(); }
  void keepRequests(std::size_t count) { requests_.resize(std::min(count, requests_.size())); }

 private:
  // States whether a single instruction can read all operands from their registers now, later, or
  // only after a copy.
  enum class Operands : std::uint8_t { Readable, NotYet, NeedCopy };

  bool planSources(std::uint32_t n, const Node& node, Candidate& candidate);
  bool planRotation(std::uint32_t n, const Node& node, Candidate& candidate);
  void planTarget(const Node& node, Candidate& candidate) const;
  Operands findRotated(const Node& n, std::uint32_t v, Place& place) const;
  Operands findOne(std::uint32_t v, bool isPortBTaken, Place& place) const;
  Operands findTwo(std::uint32_t x, std::uint32_t y, Place& px, Place& py) const;
  std::array<Place, 2> placesOf(std::uint32_t v) const { return {state_.values[v].copy, state_.values[v].main}; }
  void request(std::uint32_t v, std::uint32_t n, std::uint8_t allowed);
  void requestOperand(std::uint32_t n, const Node& node, bool hasSmallImmediate);

  const BlockState& state_;
  std::vector<CopyRequest> requests_;
};

}  // namespace qpu::compiler

#endif
