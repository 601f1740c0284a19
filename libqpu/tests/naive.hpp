// Kernels as a course project wrote them for QPULib: 16 floats at a time, the
// next block asked for ahead, one store per vector, sizes padded by the caller.
#ifndef TESTS_NAIVE_HPP
#define TESTS_NAIVE_HPP

#include "QPULib.h"

namespace naive {

// n is a multiple of 16 * QPUs; a and b have one block per QPU more.
template <typename F>
void elementwise(Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b, F f) {
  Int inc = numQPUs() << 4;
  Ptr<Float> p = a + index() + (me() << 4);
  Ptr<Float> q = b + index() + (me() << 4);
  gather(p);
  gather(q);
  Float x, y;
  For (Int i = me() << 4, i < n, i = i + inc)
    gather(p + inc);
    gather(q + inc);
    receive(x);
    receive(y);
    store(f(x, y), out + i);
    p = p + inc;
    q = q + inc;
  End
  receive(x);
  receive(y);
}
inline void add(Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b) {
  elementwise(n, out, a, b, [](Float& x, Float& y) { return x + y; });
}
inline void product(Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b) {
  elementwise(n, out, a, b, [](Float& x, Float& y) { return x * y; });
}

// 16 partial sums per row for the CPU to finish; columns is a multiple of 16, and
// a and x have 16 floats more.
inline void matrixVector(Int rows, Int columns, Ptr<Float> a, Ptr<Float> x, Ptr<Float> sums) {
  For (Int r = me(), r < rows, r = r + numQPUs())
    Float sum = 0;
    Ptr<Float> p = a + r * columns + index();
    Ptr<Float> q = x + index();
    gather(p);
    gather(q);
    Float u, v;
    For (Int i = 0, i < columns, i = i + 16)
      p = p + 16;
      q = q + 16;
      gather(p);
      gather(q);
      receive(u);
      receive(v);
      sum = sum + u * v;
    End
    receive(u);
    receive(v);
    store(sum, sums + (r << 4));
  End
}

// A row of c at a time, 16 columns at a time; n is a multiple of 16.
inline void matrixMatrix(Int m, Int n, Int k, Ptr<Float> c, Ptr<Float> a, Ptr<Float> b) {
  For (Int i = me(), i < m, i = i + numQPUs())
    For (Int j = 0, j < n, j = j + 16)
      Float sum = 0;
      Ptr<Float> p = a + i * k;
      Ptr<Float> q = b + j + index();
      For (Int l = 0, l < k, l = l + 1)
        gather(p);
        gather(q);
        Float u, v;
        receive(u);
        receive(v);
        sum = sum + u * v;
        p = p + 1;
        q = q + n;
      End
      store(sum, c + i * n + j);
    End
  End
}

}  // namespace naive

#endif
