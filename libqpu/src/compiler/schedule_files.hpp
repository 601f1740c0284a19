// Register assignment: chooses the file and the register for the result of each operation in an
// instruction.
#ifndef QPU_SRC_COMPILER_SCHEDULE_FILES_HPP
#define QPU_SRC_COMPILER_SCHEDULE_FILES_HPP

#include <array>
#include <cstdint>

#include "compiler/schedule_candidate.hpp"

namespace qpu::compiler {

// Candidates that issue in the same instruction, and the resources that they need together.
struct Bundle {
  std::array<const Candidate*, 4> candidates{};
  unsigned count = 0;
  unsigned alus = 0;
  std::uint8_t portA = isa::address::kNop;
  std::uint8_t portB = isa::address::kNop;
  std::int16_t small = -1;
  std::uint8_t exclusive = 0;
  bool receives = false;
  bool isFull = false;

  void add(const Candidate& candidate);
  const Candidate* const* begin() const { return candidates.data(); }
  const Candidate* const* end() const { return candidates.data() + count; }
};

struct FreeRegisters {
  std::uint32_t a = 0, b = 0, accumulators = 0;  // bit masks
  bool r4 = false, r5 = false;
};

class FileChooser {
 public:
  explicit FileChooser(BlockState& state) : state_(state) {}

  // Returns the registers that are free after an instruction with `bundle` and `extra` has read
  // its operands.
  FreeRegisters freeAfter(const Bundle& bundle, const Candidate& extra) const;

  // Returns the files in which the candidate's result can be placed.
  std::uint8_t choices(const Candidate& candidate, const FreeRegisters& free) const;
  // Returns true if one instruction can place the result of p in file x and the result of q in
  // file y.
  static bool canPair(const Candidate& p, std::uint8_t x, const Candidate& q, std::uint8_t y,
                      const FreeRegisters& free);

  // Returns the costs of placing the result in file A, in file B and in an accumulator.
  std::array<int, 3> costs(const Candidate& candidate) const;
  // Returns the files with the lowest total cost for the results of one or two candidates.
  std::array<std::uint8_t, 2> choose(const std::array<const Candidate*, 2>& alus, const FreeRegisters& free) const;

  // Returns the home register of the candidate's value if this register is free after the
  // candidate has issued.
  Place openHome(const Candidate& candidate) const;

  // Returns a free register in the file. To free an accumulator, the function may drop a copy.
  Place take(std::uint8_t file, const Candidate& candidate);

 private:
  void addFree(FreeRegisters& free, Place p) const;
  std::uint32_t valueOf(const Candidate& candidate) const {
    return candidate.isCopy() ? candidate.value : state_.graph.nodes[candidate.node].target;
  }

  BlockState& state_;
};

}  // namespace qpu::compiler

#endif
