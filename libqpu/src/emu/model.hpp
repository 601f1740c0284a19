// The cycle model's parameters with their values, ranges and sources, and the files that replace
// parameters.
#ifndef QPU_SRC_EMU_MODEL_HPP
#define QPU_SRC_EMU_MODEL_HPP

#include <array>
#include <cstdint>
#include <string>

#include "emu/board.hpp"

namespace qpu::emu {

// Selects a parameter's value, or the bound of its range that makes kernels faster or slower.
enum class Bound : std::uint8_t { Value, Fast, Slow };

// The rule that converts a published figure to another board.
enum class Follows : std::uint8_t {
  Nothing,      // the number is the same on all boards
  V3d,          // the number of V3D clocks is the same
  Time,         // the time in nanoseconds is the same
  MemoryClock,  // a time in nanoseconds at an SDRAM clock of 400 MHz, scaled with the SDRAM clock
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
  const char* name;  // the name in a file
  double Board::*member;
  Unit unit;
  std::array<Amount, 3> amounts;  // indexed by Bound
  const char* group;   // parameters in the same group depend on the same assumption
  const char* source;  // in short form; docs/model.md has the details
};
constexpr std::size_t kParameters = 26;
const std::array<Parameter, kParameters>& parameters();

// Returns null if the name is unknown.
const Board* findBoard(const char* name, Bound bound);

// Replaces parameters of `board` with the parameters in the text of a file. A line has the form
// "name = value", and '#' starts a comment. The line "board = ..." selects the board. If `isChosen`
// is true, `board` has already been selected, and this line must agree with it. Returns the value
// in the line "source = ...". Throws BackendError with a message that contains `path`.
std::string applyFile(const std::string& text, const std::string& path, bool isChosen,
                      Board& board);

// Returns a board's parameters in the format that applyFile() reads. Comments in the result state
// the ranges and the sources.
std::string describe(const Board& board);

}  // namespace qpu::emu

#endif
