// Saves a kernel to the file that the argument names, for use in languages other than C++.
#include "QPULib.h"

namespace {

void axpy(Int n, Float factor, Ptr<Float> x, Ptr<Float> y) {
  For (Int i = me() << 4, i < n, i = i + (numQPUs() << 4))
    y[i] = x[i] * factor + y[i];
  End
}

}  // namespace

int main(int count, char** values) {
  if (count != 2) return 2;
  compile(axpy, "axpy").save(values[1]);
  return 0;
}
