// A program with one kernel, written for QPULib. The benchmark changes the number that the kernel adds.
#include <QPULib.h>

#include <cstdio>

void add_number(Int vectors, Ptr<Float> p) {
  For (Int i = 0, i < vectors, i = i + 1)
    Float x = *p;
    *p = x + 100.0f;
    p = p + 16;
  End
}

int main() {
  Kernel<Int, Ptr<Float> > kernel = compile(add_number);
  SharedArray<float> numbers(64);
  for (int i = 0; i < 64; i++) numbers[i] = 15;
  kernel(4, &numbers);
  for (int i = 1; i < 64; i++)
    if (numbers[i] != numbers[0]) return 1;
  std::printf("result %.1f\n", numbers[0]);
  return 0;
}
