// Odd-even transposition sort of 32 integers held in two vectors: element 2i of
// the row is element i of the first vector, 2i + 1 is element i of the second.
#ifndef TUTORIAL_OET_HPP
#define TUTORIAL_OET_HPP

#include "QPULib.h"

namespace tutorial {

inline void oddEvenSort(Ptr<Int> p) {
  Int even = p[0];
  Int odd = p[16];
  // 32 phases sort 32 elements; each iteration executes two of them.
  For (Int round = 0, any(round < 16), round = round + 1)
    Int low = min(even, odd);
    odd = max(even, odd);
    even = low;

    // Each odd element is compared with the even one to its right. The last one has none.
    Int right = rotate(even, 15);
    Int smaller = min(odd, right);
    Int greater = max(odd, right);
    Where (index() == 15)
      smaller = odd;
      greater = right;
    End
    odd = smaller;
    even = rotate(greater, 1);
  End
  p[0] = even;
  p[16] = odd;
}

}  // namespace tutorial

#endif
