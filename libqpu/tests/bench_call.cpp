// What a call of a kernel costs that was called before: everything but the
// kernel's own work, on the backend in use. On the emulator that includes what it
// takes to set 1 or 12 QPUs up.
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
  (void)std::printf("libqpu %s, backend %s, a kernel that does nothing\n%6s  %20s\n",
                    qpu::version(), qpu::backend().name, "QPUs", "microseconds a call");
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
