// Computes one step of heat flow. The value of each inner cell moves towards the mean of its eight
// neighbours. The rows are distributed round-robin among the QPUs.
#ifndef TUTORIAL_HEATMAP_HPP
#define TUTORIAL_HEATMAP_HPP

#include <array>

#include "QPULib.h"

namespace tutorial {

constexpr float kDiffusion = 0.25F;

// Moves along a row and requests one vector in advance. `current` is the middle vector of the last
// three vectors that were received.
class Cursor {
 public:
  Float current;

  void start(const PtrExpr<Float>& row) {
    address = row;
    current = 0;
    gather(address);
  }
  void prime() {
    receive(next);
    request();
  }
  void advance() {
    previous = current;
    current = next;
    receive(next);
    request();
  }
  // Receives and discards the vector that was requested beyond the end of the row.
  void finish() { receive(next); }

  FloatExpr left() const { return shifted(1, previous, 0); }
  FloatExpr right() const { return shifted(15, next, 15); }

 private:
  void request() {
    address = address + 16;
    gather(address);
  }
  // Returns the neighbour of each element. The neighbour of element number `border` is in the
  // vector `beyond`.
  FloatExpr shifted(int amount, const Float& beyond, int border) const {
    Float result = rotate(current, amount);
    Float wrapped = rotate(beyond, amount);
    Where (index() == border)
      result = wrapped;
    End
    return result;
  }

  Ptr<Float> address;
  Float previous, next;
};

// `map` and `out` point to the first cells of two grids. A grid has height + 2 rows, whose starts
// are `pitch` floats apart. Row 0, row height + 1 and column 0 are the border. Each row has `width`
// inner cells, which start at column 16, and at least 32 more cells. `width` must be a multiple of
// 16.
inline void heatStep(Ptr<Float> map, Ptr<Float> out, Int pitch, Int width, Int height) {
  std::array<Cursor, 3> row;
  For (Int y = me(), y < height, y = y + numQPUs())
    Ptr<Float> above = map + y * pitch + index();
    Ptr<Float> target = out + (y + 1) * pitch + 16;
    for (Cursor& r : row) {
      r.start(above);
      above = above + pitch;
    }
    for (Cursor& r : row) r.prime();
    for (Cursor& r : row) r.advance();
    For (Int x = 0, x < width, x = x + 16)
      for (Cursor& r : row) r.advance();
      Float sum = row[0].current + row[2].current;
      for (Cursor& r : row) sum = sum + r.left() + r.right();
      store(row[1].current - kDiffusion * (row[1].current - sum * 0.125F), target);
      target = target + 16;
    End
    for (Cursor& r : row) r.finish();
  End
}

}  // namespace tutorial

#endif
