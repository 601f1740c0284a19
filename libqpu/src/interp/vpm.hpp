// The VPM, and a QPU's setups for accessing it.
#ifndef QPU_SRC_INTERP_VPM_HPP
#define QPU_SRC_INTERP_VPM_HPP

#include <array>
#include <cstdint>

#include "interp/code.hpp"
#include "interp/vector_ops.hpp"

namespace qpu::interp {

constexpr std::uint32_t kVpmRows = 64;
constexpr std::uint32_t kVpmColumns = 16;

class Vpm {
 public:
  std::uint32_t& word(std::uint32_t row, std::uint32_t column) { return rows_[row].e[column]; }

  // The address of a horizontal vector is its row. The address of a vertical vector is 16 * (row
  // / 16) + column. Addresses wrap at 64.
  void read(Direction d, std::uint32_t address, Vector& v) {
    for (std::uint32_t i = 0; i < kElements; ++i) v.e[i] = at(d, address, i);
  }
  void write(Direction d, std::uint32_t address, const Vector& v) {
    for (std::uint32_t i = 0; i < kElements; ++i) at(d, address, i) = v.e[i];
  }

 private:
  std::uint32_t& at(Direction d, std::uint32_t address, std::uint32_t i) {
    const std::uint32_t wrapped = address % kVpmRows;
    if (d == Direction::Horizontal) return rows_[wrapped].e[i];
    return rows_[(wrapped & 0x30U) + i].e[wrapped & 0xfU];
  }

  std::array<Vector, kVpmRows> rows_{};
};

// A QPU's window for accesses to vectors. The address advances by the stride after each access.
struct VpmWindow {
  bool ready = false;
  Direction direction = Direction::Horizontal;
  std::uint32_t address = 0;
  std::uint32_t stride = 0;
  int left = 0;  // vectors that remain to be read; used only for reads
};

// The state of a QPU's DMA loads or of its DMA stores.
struct Dma {
  bool ready = false;
  bool running = false;  // a transfer was started, and the QPU has not waited for it yet
  bool hasPitch = false;
  // The distance in bytes from the start (loads) or the end (stores) of a memory row to the start
  // of the next.
  std::uint32_t pitch = 0;
  Direction direction = Direction::Horizontal;
  std::uint32_t row = 0;
  std::uint32_t column = 0;
  std::uint32_t rows = 0;
  std::uint32_t length = 0;  // number of words in a memory row
  std::uint32_t rowsApart = 1;     // distance between memory rows in the VPM
  std::uint32_t columnsApart = 0;
};

}  // namespace qpu::interp

#endif
