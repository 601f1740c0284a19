// Rotates n vertices about the z axis: x' = x cos - y sin, y' = y cos + x sin.
#ifndef TUTORIAL_ROT3D_HPP
#define TUTORIAL_ROT3D_HPP

#include "QPULib.h"

namespace tutorial {

// Version 1: processes one vector at a time and waits for each load.
inline void rot3D1(Int n, Float cosine, Float sine, Ptr<Float> x, Ptr<Float> y) {
  For (Int i = 0, i < n, i = i + 16)
    Float xOld = x[i];
    Float yOld = y[i];
    x[i] = xOld * cosine - yOld * sine;
    y[i] = yOld * cosine + xOld * sine;
  End
}

inline void rotatePipelined(const IntExpr& first, const IntExpr& step, Int& n, Float& cosine,
                            Float& sine, Ptr<Float>& x, Ptr<Float>& y) {
  Int inc = step;
  Ptr<Float> p = x + index() + first;
  Ptr<Float> q = y + index() + first;
  gather(p);
  gather(q);
  Float xOld, yOld;
  For (Int i = first, i < n, i = i + inc)
    gather(p + inc);
    gather(q + inc);
    receive(xOld);
    receive(yOld);
    store(xOld * cosine - yOld * sine, p);
    store(yOld * cosine + xOld * sine, q);
    p = p + inc;
    q = q + inc;
  End
  receive(xOld);
  receive(yOld);
}

// Version 2: requests the next vector before it processes the current vector.
inline void rot3D2(Int n, Float cosine, Float sine, Ptr<Float> x, Ptr<Float> y) {
  rotatePipelined(0, 16, n, cosine, sine, x, y);
}

// Version 3: distributes the vectors round-robin among the QPUs.
inline void rot3D3(Int n, Float cosine, Float sine, Ptr<Float> x, Ptr<Float> y) {
  rotatePipelined(me() << 4, numQPUs() << 4, n, cosine, sine, x, y);
}

}  // namespace tutorial

#endif
