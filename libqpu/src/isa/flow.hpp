// Forward data-flow analysis for the verifier. The analysis finds undefined registers, propagates
// constants and tracks operations that may be in progress. Reference: Gary A. Kildall, "A Unified
// Approach to Global Program Optimization", 1973.
#ifndef QPU_SRC_ISA_FLOW_HPP
#define QPU_SRC_ISA_FLOW_HPP

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "isa/access.hpp"
#include "isa/rules.hpp"
#include "isa/setup.hpp"

namespace qpu::isa {

// The lattice value that represents the contents of a register.
class Cell {
 public:
  static Cell constant(std::uint32_t bits) { return {Kind::Constant, false, bits}; }
  static Cell varying() { return {Kind::Varying, false, 0}; }

  Cell() = default;

  bool mayBeUndefined() const { return mayBeUndefined_; }
  bool isConstant() const { return kind_ == Kind::Constant; }
  std::uint32_t bits() const { return bits_; }

  // Merges the value from another path into this value. Returns true if this value has changed.
  bool join(const Cell& other);

 private:
  enum class Kind : std::uint8_t { Nothing, Constant, Varying };

  Cell(Kind kind, bool mayBeUndefined, std::uint32_t bits)
      : kind_(kind), mayBeUndefined_(mayBeUndefined), bits_(bits) {}

  Kind kind_ = Kind::Nothing;
  bool mayBeUndefined_ = true;
  std::uint32_t bits_ = 0;
};

// The set of possible values of a counter. Bit n is set if n is a possible value.
using Counts = std::uint32_t;

struct State {
  std::array<Cell, 32> fileA, fileB;
  std::array<Cell, 6> accumulators;
  bool flagsUndefined = true;
  std::array<Counts, 2> tmu{1, 1};    // requests in flight, for each TMU
  bool mayMissNoSwap = true;
  Counts vpmReads = 1;                // vectors that remain to be read; 0 if unknown
  bool mayMissWriteSetup = true;
  bool mayMissLoadSetup = true, mayMissStoreSetup = true;
  Cell loadSetup;                     // the last DMA load setup
  bool mayLoad = false, mayStore = false;  // a DMA transfer may be in progress
  bool mayHoldMutex = false;
  // True if the last instruction may have set up VPM reads.
  bool wroteReadSetup = false;

  bool join(const State& other);
};

using Report = std::function<void(RuleId, const std::string& detail)>;

// Applies one instruction to the state and reports violations of the rules. `twoTmus` is true if
// the program uses both TMUs.
void step(State& state, const Instruction& instruction, const Access& access, bool twoTmus,
          const Report& report);

// Reports the violations that exist when the program ends.
void finish(const State& state, const Report& report);

}  // namespace qpu::isa

#endif
