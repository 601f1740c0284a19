// Odd-even transposition sort of 32 integers, which are in two vectors. Element i of the first
// vector is element 2i of the sequence, and element i of the second vector is element 2i + 1.
#ifndef TUTORIAL_OET_HPP
#define TUTORIAL_OET_HPP

#include "QPULib.h"

namespace tutorial {

inline void oddEvenSort(Ptr<Int> p) {
  Int even = p[0];
  Int odd = p[16];
  // Sorting 32 elements takes 32 phases. Each iteration executes two phases.
  For (Int round = 0, any(round < 16), round = round + 1)
    Int low = min(even, odd);
    odd = max(even, odd);
    even = low;

    // Each odd element is compared with the even element to its right. The last odd element has
    // no element to its right.
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
