// Computes the greatest common divisors of 16 pairs of numbers by repeated subtraction.
#ifndef TUTORIAL_GCD_HPP
#define TUTORIAL_GCD_HPP

#include "QPULib.h"

namespace tutorial {

inline void subtractSmaller(Int& a, Int& b) {
  Where (a > b)
    a = a - b;
  End
  Where (a < b)
    b = b - a;
  End
}

inline void gcd(Ptr<Int> p, Ptr<Int> q, Ptr<Int> r) {
  Int a = *p;
  Int b = *q;
  While (any(a != b))
    subtractSmaller(a, b);
  End
  *r = a;
}

// Executes 32 steps between two tests of the condition. After the divisor has been found, further
// steps do not change the result.
inline void gcdUnrolled(Ptr<Int> p, Ptr<Int> q, Ptr<Int> r) {
  Int a = *p;
  Int b = *q;
  While (any(a != b))
    for (int step = 0; step < 32; ++step) subtractSmaller(a, b);
  End
  *r = a;
}

}  // namespace tutorial

#endif
