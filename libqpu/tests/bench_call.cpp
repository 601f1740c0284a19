// Measures the overhead of a call to a kernel that has been called before, on the current
// backend. On the emulator, the overhead includes setting up 1, 4 or 12 QPUs.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "QPULib.h"

namespace {

void nothing(Int n, Ptr<Float> x) {
  If (n > 1000000)
    *x = 0.0F;
  End
}

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + static_cast<long>(times.size() / 2),
                   times.end());
  return times[times.size() / 2];
}

}  // namespace

int main() {
  auto k = compile(nothing, "nothing");
  SharedArray<float> x(16);
  (void)std::printf("libqpu %s, backend %s, empty kernel\n%6s  %20s\n",
                    qpu::version(), qpu::backend().name, "QPUs", "microseconds per call");
  for (const int qpus : {1, 4, 12}) {
    k.setNumQPUs(qpus);
    std::vector<double> times;
    for (int i = 0; i < 3000; ++i) {
      const auto start = std::chrono::steady_clock::now();
      k(1, &x);
      const std::chrono::duration<double, std::micro> taken =
          std::chrono::steady_clock::now() - start;
      times.push_back(taken.count());
    }
    (void)std::printf("%6d  %20.2f\n", qpus, median(times));
  }
  return 0;
}
