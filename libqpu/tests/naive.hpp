// Kernels like those of a course project that used QPULib. The kernels process 16 floats at a time,
// request the next block in advance, and store each vector separately. The caller must pad the
// arrays.
#ifndef TESTS_NAIVE_HPP
#define TESTS_NAIVE_HPP

#include "QPULib.h"

namespace naive {

struct PlainStore {
  template <typename X>
  void operator()(const X& x, const PtrExpr<Float>& to) const {
    store(x, to);
  }
};

// n must be a multiple of 16 times the number of QPUs. a and b must have one additional block per
// QPU.
template <typename F, typename Store>
void elementwise(Int& n, Ptr<Float>& out, Ptr<Float>& a, Ptr<Float>& b, F f, Store storeVector) {
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
    storeVector(f(x, y), out + i);
    p = p + inc;
    q = q + inc;
  End
  receive(x);
  receive(y);
}
inline void add(Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b) {
  elementwise(n, out, a, b, [](Float& x, Float& y) { return x + y; }, PlainStore());
}
inline void product(Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b) {
  elementwise(n, out, a, b, [](Float& x, Float& y) { return x * y; }, PlainStore());
}

// Computes 16 partial sums per row, which the CPU adds. `columns` must be a multiple of 16. a and x
// must have 16 additional floats.
template <typename Store>
void rowSums(Int& rows, Int& columns, Ptr<Float>& a, Ptr<Float>& x, Ptr<Float>& sums,
             Store storeVector) {
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
    storeVector(sum, sums + (r << 4));
  End
}
inline void matrixVector(Int rows, Int columns, Ptr<Float> a, Ptr<Float> x, Ptr<Float> sums) {
  rowSums(rows, columns, a, x, sums, PlainStore());
}

}  // namespace naive

#endif
