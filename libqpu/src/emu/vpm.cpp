#include "emu/vpm.hpp"

namespace qpu::emu {
namespace {

constexpr std::uint32_t field(std::uint32_t word, unsigned low, unsigned bits) {
  return word >> low & ((1U << bits) - 1U);
}
constexpr std::uint32_t orIfZero(std::uint32_t value, std::uint32_t other) {
  return value == 0 ? other : value;
}

// Sets the unit of the transfer from MODEW: 0 means words, 2 and 3 mean halfwords, and 4..7 mean
// bytes.
void setUnits(Transfer& t, std::uint32_t mode) {
  if (mode >= 4) {
    t.unitBytes = 1;
    t.part = mode - 4;
  } else if (mode >= 2) {
    t.unitBytes = 2;
    t.part = mode - 2;
  }
}

}  // namespace

Window::Window(std::uint32_t setup)
    : ready(true),
      horizontal(field(setup, 11, 1) != 0),
      laned(field(setup, 10, 1) != 0),
      size(field(setup, 8, 2)),
      address(field(setup, 0, 8)),
      stride(orIfZero(field(setup, 12, 6), 64)),
      left(orIfZero(field(setup, 20, 4), 16)) {}

Window::Place Window::place(std::uint32_t e) const {
  // The low bits of the address, below the fields X and Y.
  const std::uint32_t partBits = 2 - size;
  const std::uint32_t part = address & ((1U << partBits) - 1U);
  const std::uint32_t at = address >> partBits;
  const std::uint32_t bits = 8U << size;
  // The index of the word in the direction of the vector, and the part of this word.
  std::uint32_t along = e;
  std::uint32_t within = part;
  if (!laned && size != 2) {
    const auto perWord = std::uint32_t{4} >> size;
    along = part * (16U / perWord) + e / perWord;
    within = e % perWord;
  }
  if (horizontal) return {kVpmColumns * (at % kVpmRows) + along, bits * within};
  const std::uint32_t row = (at >> 4U & 3U) * 16 + along;
  return {kVpmColumns * row + (at & 15U), bits * within};
}

// Returns the position of the first unit of memory row i, counted in units from row 0 or column
// 0.
std::uint32_t Transfer::position(std::uint32_t i) const {
  return (sideways ? column : row) * perWord() + part + i * vpmPitch;
}

// Returns the distance of unit j from the start of its row or column of words, in units.
std::uint32_t Transfer::within(std::uint32_t i, std::uint32_t j) const {
  return position(i) % perWord() + j;
}

std::uint32_t Transfer::word(std::uint32_t i, std::uint32_t j) const {
  if (packed) {
    const std::uint32_t units = part + i * length + j;
    const std::uint32_t first =
        horizontal ? kVpmColumns * row + column : kVpmRows * column + row;
    const std::uint32_t n = first + units / perWord();
    if (n >= kVpmWords || row >= kVpmRows) return kOutside;
    return horizontal ? n : kVpmColumns * (n % kVpmRows) + n / kVpmRows;
  }
  const std::uint32_t line = position(i) / perWord();
  const std::uint32_t along = within(i, j) / perWord();
  const std::uint32_t r = (sideways ? row : line) + (horizontal ? 0 : along);
  const std::uint32_t c = (sideways ? line : column) + (horizontal ? along : 0);
  return r < kVpmRows && c < kVpmColumns ? kVpmColumns * r + c : kOutside;
}

std::uint32_t Transfer::shift(std::uint32_t i, std::uint32_t j) const {
  const std::uint32_t units = packed ? part + i * length + j : within(i, j);
  return 8 * unitBytes * (units % perWord());
}

bool DmaSetup::loadUsesPitch() const { return field(basic, 24, 4) == 0; }

Transfer DmaSetup::load() const {
  Transfer t;
  setUnits(t, field(basic, 28, 3));
  t.length = orIfZero(field(basic, 20, 4), 16);
  t.rows = orIfZero(field(basic, 16, 4), 16);
  t.vpmPitch = orIfZero(field(basic, 12, 4), 16);
  t.horizontal = field(basic, 11, 1) == 0;
  t.row = field(basic, 4, 7);
  t.column = field(basic, 0, 4);
  t.memoryPitch = loadUsesPitch() ? pitch : 8U << field(basic, 24, 4);
  return t;
}

Transfer DmaSetup::store() const {
  Transfer t;
  setUnits(t, field(basic, 0, 3));
  t.rows = orIfZero(field(basic, 23, 7), 128);
  t.length = orIfZero(field(basic, 16, 7), 128);
  t.horizontal = field(basic, 14, 1) != 0;
  t.row = field(basic, 7, 7);
  t.column = field(basic, 3, 4);
  t.packed = packed;
  t.sideways = !t.horizontal;
  t.vpmPitch = t.unitBytes == 4 ? 1 : 4 / t.unitBytes;
  t.memoryPitch = t.length * t.unitBytes + pitch;
  return t;
}

}  // namespace qpu::emu
