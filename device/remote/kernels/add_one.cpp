// Adds 1 to each of n floats on all twelve QPUs. Each QPU processes every twelfth vector of 16 floats.
#include "kernel.hpp"

#include <QPULib.h>

static void addOne(Int n, Ptr<Float> in, Ptr<Float> out) {
  For (Int i = me() << 4, i < n, i = i + (numQPUs() << 4))
    out[i] = in[i] + 1.0f;
  End
}

PITORCH_KERNEL(arrays) {
  static auto kernel = compile(addOne);
  kernel.setNumQPUs(12);
  kernel(arrays.size(0), qpu::BusPointer<float>(arrays.floats(0)), qpu::BusPointer<float>(arrays.floats(1)));
  return kernel.cycles().seconds();
}
