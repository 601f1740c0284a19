// The VPM, the windows through which QPUs read and write it, and the layout of DMA transfers.
// Manual: section 7, VPM and VCD/VDW.
#ifndef QPU_SRC_EMU_VPM_HPP
#define QPU_SRC_EMU_VPM_HPP

#include <array>
#include <cstdint>

#include "emu/alu.hpp"

namespace qpu::emu {

constexpr std::uint32_t kVpmRows = 64;
constexpr std::uint32_t kVpmColumns = 16;
constexpr std::uint32_t kVpmWords = kVpmRows * kVpmColumns;

// Assumptions that a test on a board can confirm:
// - Reads of 8 or 16 bits are zero-extended. Test: write 0xffffffff and read laned bytes.
// - DMA of 8 or 16 bits fills consecutive bytes or halfwords in the words from X on, and starts
//   with the byte or halfword that MODEW selects. Test: load 64 ascending bytes with MODEW 5.
// - VPITCH carries into the upper bits of Y. Test: load 4 rows from Y = 14.
// - A row of a transfer does not continue in the next row of the VPM. The emulator reports such a
//   row as an error. Test: store one row of 32 words.
// - BLOCKMODE with columns continues at the top of the next column. Test: store 2 rows of 48 words.
// - If DEPTH is 1, each row is one unit further down the column. Test: store 16 rows of one
//   halfword.

// A QPU's window for accesses to vectors. The manual's table "VPM generic block" describes the
// setup word.
struct Window {
  bool ready = false;
  bool horizontal = true;
  bool laned = false;
  std::uint32_t size = 2;  // 0: bytes, 1: halfwords, 2: words
  std::uint32_t address = 0;
  std::uint32_t stride = 0;
  std::uint32_t left = 0;  // number of vectors that remain to be read

  explicit Window(std::uint32_t setup);
  Window() = default;

  struct Place {
    std::uint32_t word;  // 16 * row + column
    std::uint32_t shift;
  };
  // Returns the place in the VPM of element e of the vector at the current address. An element has
  // 8 << size bits.
  Place place(std::uint32_t e) const;
  // Returns true if a vector is a row of words.
  bool isRow() const { return size == 2 && horizontal; }
  std::uint32_t row() const { return address % kVpmRows; }
  void advance() { address += stride; }
};

// A transfer between memory and the VPM.
struct Transfer {
  bool horizontal = true;       // memory rows lie along VPM rows
  bool packed = false;          // BLOCKMODE: memory rows are contiguous in the VPM
  bool sideways = false;        // consecutive memory rows are in consecutive columns
  std::uint32_t rows = 1;
  std::uint32_t length = 1;     // length of a memory row, in units
  std::uint32_t unitBytes = 4;
  std::uint32_t row = 0;        // row of the first word
  std::uint32_t column = 0;
  std::uint32_t part = 0;       // first unit within the first word
  // The distance between memory rows in the VPM. The distance is added to the VPM row even if
  // `horizontal` is false (Broadcom's guide: VPITCH is added to Y in both modes). If a unit is a
  // part of a word, the distance is in units. If `sideways` is true, the distance is added to the
  // column.
  std::uint32_t vpmPitch = 1;
  // Distance from the start of one memory row to the start of the next.
  std::uint32_t memoryPitch = 0;

  static constexpr std::uint32_t kOutside = UINT32_MAX;
  // Returns the word (16 * row + column) that contains unit j of memory row i, or kOutside if the
  // unit is not in the VPM.
  std::uint32_t word(std::uint32_t i, std::uint32_t j) const;
  // Returns true if memory row i consists of adjacent words in a single row of the VPM.
  bool isRowOfWords(std::uint32_t i) const {
    return unitBytes == 4 && horizontal && !packed && column + length <= kVpmColumns &&
           row + i * vpmPitch < kVpmRows;
  }
  // Returns the position of the unit's lowest bit in its word.
  std::uint32_t shift(std::uint32_t i, std::uint32_t j) const;

 private:
  std::uint32_t perWord() const { return 4 / unitBytes; }
  std::uint32_t position(std::uint32_t i) const;
  std::uint32_t within(std::uint32_t i, std::uint32_t j) const;
};

// A QPU's setup for DMA loads or for DMA stores.
struct DmaSetup {
  bool ready = false;
  bool hasPitch = false;
  std::uint32_t basic = 0;
  std::uint32_t pitch = 0;  // MPITCHB for loads, STRIDE for stores
  bool packed = false;      // BLOCKMODE, for stores only

  Transfer load() const;
  bool loadUsesPitch() const;
  Transfer store() const;
};

class Vpm {
 public:
  std::uint32_t& word(std::uint32_t n) { return words_[n / kVpmColumns].e[n % kVpmColumns]; }

  void read(const Window& w, Vector& v) {
    if (w.isRow()) {
      v = words_[w.row()];
      return;
    }
    const std::uint32_t part = partMask(w);
    for (std::uint32_t e = 0; e < kElements; ++e) {
      const Window::Place p = w.place(e);
      v.e[e] = word(p.word) >> p.shift & part;
    }
  }
  void write(const Window& w, const Vector& v) {
    if (w.isRow()) {
      words_[w.row()] = v;
      return;
    }
    const std::uint32_t part = partMask(w);
    for (std::uint32_t e = 0; e < kElements; ++e) {
      const Window::Place p = w.place(e);
      std::uint32_t& x = word(p.word);
      x = (x & ~(part << p.shift)) | (v.e[e] & part) << p.shift;
    }
  }

 private:
  static std::uint32_t partMask(const Window& w) {
    return w.size == 2 ? UINT32_MAX : (1U << (8U << w.size)) - 1U;
  }

  std::array<Vector, kVpmRows> words_{};
};

}  // namespace qpu::emu

#endif
