// The parameters of the cycle model: value, range and source of each, and files
// that replace them.
#ifndef QPU_SRC_EMU_MODEL_HPP
#define QPU_SRC_EMU_MODEL_HPP

#include <array>
#include <cstdint>
#include <string>

#include "emu/board.hpp"

namespace qpu::emu {

// A value, or the end of its range that makes kernels quicker or slower.
enum class Bound : std::uint8_t { Value, Fast, Slow };

// How a published figure is carried over to another board.
enum class Follows : std::uint8_t {
  Nothing,      // the same number on all
  V3d,          // so many clocks of the V3D
  Time,         // so many nanoseconds
  MemoryClock,  // so many nanoseconds where the SDRAM runs at 400 MHz
  MemoryPins,   // this share of the bytes that the SDRAM's pins can carry
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
  std::array<Amount, 3> amounts;  // by Bound
  const char* group;   // parameters that one assumption moves together
  const char* source;  // in a few words; docs/model.md has more
};
constexpr std::size_t kParameters = 26;
const std::array<Parameter, kParameters>& parameters();

// Null for an unknown name.
const Board* findBoard(const char* name, Bound bound);

// Replaces parameters of `board` by those of a file's text, lines of "name = value"
// where '#' begins a comment. `board` is that of the line "board = ...", or as
// given when `isChosen`; both at once must agree. The line "source = ..." is
// returned. Throws BackendError, with `path` in the text.
std::string applyFile(const std::string& text, const std::string& path, bool isChosen,
                      Board& board);

// A board's parameters as such a file, with their ranges and sources as comments.
std::string describe(const Board& board);

}  // namespace qpu::emu

#endif
