// What the paths to an instruction have done: registers that may be undefined,
// constants in registers, work that may be outstanding.
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

// A register as far as it is known.
class Cell {
 public:
  static Cell constant(std::uint32_t bits) { return {Kind::Constant, false, bits}; }
  static Cell varying() { return {Kind::Varying, false, 0}; }

  Cell() = default;

  bool mayBeUndefined() const { return mayBeUndefined_; }
  bool isConstant() const { return kind_ == Kind::Constant; }
  std::uint32_t bits() const { return bits_; }

  // Another path's; true if that changed anything.
  bool join(const Cell& other);

 private:
  enum class Kind : std::uint8_t { Nothing, Constant, Varying };

  Cell(Kind kind, bool mayBeUndefined, std::uint32_t bits)
      : kind_(kind), mayBeUndefined_(mayBeUndefined), bits_(bits) {}

  Kind kind_ = Kind::Nothing;
  bool mayBeUndefined_ = true;
  std::uint32_t bits_ = 0;
};

// Possible values of a count: bit n for n.
using Counts = std::uint32_t;

struct State {
  std::array<Cell, 32> fileA, fileB;
  std::array<Cell, 6> accumulators;
  bool flagsUndefined = true;
  std::array<Counts, 2> tmu{1, 1};    // requests outstanding
  bool mayMissNoSwap = true;
  Counts vpmReads = 1;                // vectors to come; 0: not known
  bool mayMissWriteSetup = true;
  bool mayMissLoadSetup = true, mayMissStoreSetup = true;
  Cell loadSetup;                     // the last DMA load setup
  bool mayLoad = false, mayStore = false;  // a DMA transfer may be under way
  bool mayHoldMutex = false;
  // Of the last instruction alone: it may have set up reads of the VPM.
  bool wroteReadSetup = false;

  bool join(const State& other);
};

using Report = std::function<void(RuleId, const std::string& detail)>;

// Runs one instruction: reports what is wrong with it in this state, and makes
// the state that of what follows. `twoTmus`: the program uses both.
void step(State& state, const Instruction& instruction, const Access& access, bool twoTmus,
          const Report& report);

// At the end of a program.
void finish(const State& state, const Report& report);

}  // namespace qpu::isa

#endif
