// Computes the escape counts of z <- z^2 + c on a grid. The rows are distributed round-robin among
// the QPUs.
#ifndef TUTORIAL_MANDELBROT_HPP
#define TUTORIAL_MANDELBROT_HPP

#include "QPULib.h"

namespace tutorial {

// `width` must be a multiple of 16. `out` receives width * height counts in the range 0..limit.
inline void mandelbrot(Float left, Float top, Float step, Int width, Int height, Int limit,
                       Ptr<Int> out) {
  For (Int y = me(), y < height, y = y + numQPUs())
    Float ci = top + toFloat(y) * step;
    For (Int x = 0, x < width, x = x + 16)
      Float cr = left + toFloat(x + index()) * step;
      Float re = 0, im = 0;
      Int count = 0;
      Int going = 1;
      While (any(going > 0))
        Float re2 = re * re;
        Float im2 = im * im;
        Where (re2 + im2 > 4.0F || count >= limit)
          going = 0;
        End
        Where (going > 0)
          im = re * im * 2.0F + ci;
          re = re2 - im2 + cr;
          count = count + 1;
        End
      End
      out[y * width + x] = count;
    End
  End
}

}  // namespace tutorial

#endif
