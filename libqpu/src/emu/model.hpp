// The cycle model's parameters with value, range and source, and the files that replace them.
#ifndef QPU_SRC_EMU_MODEL_HPP
#define QPU_SRC_EMU_MODEL_HPP

#include <array>
#include <cstdint>
#include <string>

#include "emu/board.hpp"

namespace qpu::emu {

// A parameter's value, or the end of its range that makes kernels faster or slower.
enum class Bound : std::uint8_t { Value, Fast, Slow };

// How a published figure is converted to another board.
enum class Follows : std::uint8_t {
  Nothing,      // the same number on all boards
  V3d,          // the same number of clocks of the V3D
  Time,         // the same number of nanoseconds
  MemoryClock,  // nanoseconds at an SDRAM clock of 400 MHz, scaled with the SDRAM clock
  MemoryPins,   // a fraction of the SDRAM's pin bandwidth
};
struct Amount {
  double number;
  Follows follows;
};

enum class Unit : std::uint8_t { Hertz, Clocks, Nanoseconds, Microseconds, BytesPerClock,
                                 BytesPerSecond, Bytes };
const char* name(Unit unit);

struct Parameter {
  const char* name;  // in a file
  double Board::*member;
  Unit unit;
  std::array<Amount, 3> amounts;  // indexed by Bound
  const char* group;   // parameters that depend on the same assumption
  const char* source;  // short; docs/model.md has details
};
constexpr std::size_t kParameters = 26;
const std::array<Parameter, kParameters>& parameters();

// Null for an unknown name.
const Board* findBoard(const char* name, Bound bound);

// Replaces parameters of `board` with those in the text of a file. Lines have the form "name =
// value"; '#' starts a comment. The line "board = ..." selects the board. If `isChosen`, `board`
// is already selected, and this line must agree with it. Returns the value of the line "source =
// ...". Throws BackendError; its message contains `path`.
std::string applyFile(const std::string& text, const std::string& path, bool isChosen,
                      Board& board);

// Returns a board's parameters in the format that applyFile() reads, with ranges and sources as
// comments.
std::string describe(const Board& board);

}  // namespace qpu::emu

#endif
