// Prints from two QPUs. The test compares the standard output with the expected text.
#include "QPULib.h"

void hello(Ptr<Float> p) {
  Print("QPU ");
  Print(me());
  Print(toFloat(index()) * 0.5F);
  If (any(me() == 0))
    Print(3);
    Print(1.5);
  End
  p[me() << 4] = 0;
}

int main() {
  SharedArray<float> a(32);
  auto k = compile(hello);
  k.setNumQPUs(2);
  k(&a);
}
