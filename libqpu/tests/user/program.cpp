// A program as users of QPULib write it. The program is built with these users' flags (-fpermissive
// -Wconversion -std=c++0x), and warnings are treated as errors.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "QPULib.h"

using namespace std;

class Pair {
 public:
  Float first, second;
  void load(Ptr<Float> p) {
    gather(p + index());
    gather(p + index() + 16);
    receive(first);
    receive(second);
  }
  Float dot(Pair& other) { return first * other.first + second * other.second; }
};

void combine(Int n, Float scale, Ptr<Float> p, Ptr<Ptr<Float> > rows, Ptr<Int> counts) {
  Int inc = numQPUs() << 4;
  Pair pair[2];
  Int done = 0;
  For (Int i = me() * 16, i < n, i = i + inc)
    Ptr<Float> row = *(rows + i);
    pair[0].load(p);
    pair[1].load(row);
    Float sum = pair[0].dot(pair[1]) * scale;
    Where (sum < 0)
      sum = 0;
    Else
      sum = sum + 0.5;
    End
    If (any(sum > 1000.0f) && i >= 0)
      sum = rotate(sum, 15) - rotate(sum, done);
    Else
      p[i] = sum;
    End
    done++;
  End
  While (any(done < 4) || all(done == 0))
    done = min(done + 1, 4) | ((done & ~done) ^ 0);
  End
  counts[me() << 4] = max(done, toInt(toFloat(done) * 1.0f));
}

int main() {
  Kernel<Int, Float, Ptr<Float>, Ptr<Ptr<Float> >, Ptr<Int> > k = compile(combine);
  k.setNumQPUs(2);
  SharedArray<float> p(32), other(32);
  SharedArray<float*> rows(32 + 16);
  SharedArray<int> counts(32);
  for (int i = 0; i < 32; i++) {
    p[i] = (float)i;
    other[i] = 1;
  }
  for (int i = 0; i < 48; i++) rows[i] = other.getPointer();
  k(16, sqrtf(4.0f), &p, &rows, &counts);
  for (int i = 0; i < 16; i++) {
    float expected = (float)(2 * i + 16) * 2.0f + 0.5f;
    if (p[i] != expected || counts[i] != 4) {
      printf("%d: %f, expected %f; count %d\n", i, p[i], expected, counts[i]);
      return 1;
    }
  }
  return 0;
}
