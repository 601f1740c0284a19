// Computes triangular numbers n(n+1)/2 by addition: for 16 numbers, for 16 numbers on each QPU,
// and for floats in memory.
#ifndef TUTORIAL_TRI_HPP
#define TUTORIAL_TRI_HPP

#include "QPULib.h"

namespace tutorial {

inline Int sumUpTo(Int n) {
  Int sum = 0;
  While (any(n > 0))
    Where (n > 0)
      sum = sum + n;
      n = n - 1;
    End
  End
  return sum;
}

inline void tri(Ptr<Int> p) { *p = sumUpTo(*p); }

inline void multiTri(Ptr<Int> p) {
  p = p + (me() << 4);
  *p = sumUpTo(*p);
}

inline void triFloat(Ptr<Float> p) {
  Int n = toInt(*p);
  *p = toFloat(sumUpTo(n));
}

// Processes 16 vectors in one call and accesses the VPM directly.
inline void dmaTri(Ptr<Int> p) {
  dmaSetReadPitch(64);
  dmaSetupRead(HORIZ, 16, 0);
  dmaStartRead(p);
  dmaWaitRead();

  vpmSetupRead(HORIZ, 16, 0);
  vpmSetupWrite(HORIZ, 0);
  for (int i = 0; i < 16; ++i) {
    Int n = vpmGetInt();
    vpmPut(sumUpTo(n));
  }

  dmaSetWriteStride(0);
  dmaSetupWrite(HORIZ, 16, 0);
  dmaStartWrite(p);
  dmaWaitWrite();
}

}  // namespace tutorial

#endif
