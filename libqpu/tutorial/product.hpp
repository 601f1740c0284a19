// Matrix products in row-major order: c (m x n) = a (m x k) b (k x n).
#ifndef TUTORIAL_PRODUCT_HPP
#define TUTORIAL_PRODUCT_HPP

#include <array>

#include "QPULib.h"

namespace tutorial {

// Computes 16 elements in a row of c at a time. Every multiplication reads two vectors, one of
// which contains the same number 16 times. n must be a multiple of 16.
inline void productPlain(Int m, Int n, Int k, Ptr<Float> c, Ptr<Float> a, Ptr<Float> b) {
  For (Int i = me(), i < m, i = i + numQPUs())
    For (Int j = 0, j < n, j = j + 16)
      Float sum = 0;
      Ptr<Float> p = a + i * k;
      Ptr<Float> q = b + j + index();
      For (Int l = 0, l < k, l = l + 1)
        gather(p);
        gather(q);
        Float x, y;
        receive(x);
        receive(y);
        sum = sum + x * y;
        p = p + 1;
        q = q + n;
      End
      store(sum, c + i * n + j);
    End
  End
}

// Keeps a tile of 4 rows by 32 columns in registers for all values of k. Therefore, for each value
// of k, only 2 vectors of b are read for 8 sums. Each QPU reads the elements of a for 16 values of
// k at a time, and broadcasts these elements one by one. m must be a multiple of 4, n a multiple of
// 32, and k a multiple of 16.
inline void productTiled(Int m, Int n, Int k, Ptr<Float> c, Ptr<Float> a, Ptr<Float> b) {
  constexpr std::size_t rows = 4, across = 2;
  For (Int i = me() << 2, i < m, i = i + (numQPUs() << 2))
    For (Int j = 0, j < n, j = j + 32)
      std::array<std::array<Float, across>, rows> sum;
      for (auto& r : sum)
        for (Float& s : r) s = 0;
      Ptr<Float> p = a + i * k + index();
      Ptr<Float> q = b + j + index();
      For (Int l = 0, l < k, l = l + 16)
        std::array<Float, rows> x;
        Ptr<Float> row = p;
        for (std::size_t r = 0; r < rows; ++r) {
          gather(row);
          row = row + k;
        }
        for (Float& v : x) receive(v);
        p = p + 16;
        // Two rows of b are requested in advance.
        const auto request = [&] {
          gather(q);
          gather(q + 16);
          q = q + n;
        };
        request();
        request();
        for (int t = 0; t < 16; ++t) {
          std::array<Float, across> y;
          for (Float& v : y) receive(v);
          if (t < 14) request();
          for (std::size_t r = 0; r < rows; ++r) {
            Float one = broadcast(x[r], t);
            for (std::size_t s = 0; s < across; ++s) sum[r][s] = sum[r][s] + one * y[s];
          }
        }
      End
      Ptr<Float> to = c + i * n + j;
      for (auto& r : sum) {
        store(r[0], to);
        store(r[1], to + 16);
        to = to + n;
      }
    End
  End
}

}  // namespace tutorial

#endif
