// qpu-selftest: runs several kernels with known results on the current backend. Prints one line
// per check. The exit code is 1 if a check fails, and 0 otherwise.
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "tutorial/gcd.hpp"
#include "tutorial/memory.hpp"
#include "tutorial/oet.hpp"
#include "tutorial/rot3d.hpp"
#include "tutorial/tri.hpp"

namespace {

// A check returns an empty string on success, and a description of the difference otherwise.
using Check = std::function<std::string()>;

std::string difference(const std::string& name, double found, double expected) {
  return name + " is " + std::to_string(found) + ", expected " + std::to_string(expected);
}

int triangular(int n) { return n * (n + 1) / 2; }

int euclid(int a, int b) { return b == 0 ? a : euclid(b, a % b); }

std::string checkGcd() {
  qpu::SharedArray<int> a(16), b(16), r(16);
  for (int i = 0; i < 16; ++i) {
    a[i] = 100 + 37 * i % 101;
    b[i] = 100 + 53 * i % 97;
  }
  qpu::compile(tutorial::gcd, "gcd")(&a, &b, &r);
  for (int i = 0; i < 16; ++i)
    if (r[i] != euclid(a[i], b[i]))
      return difference("gcd " + std::to_string(i), r[i], euclid(a[i], b[i]));
  return {};
}

std::string checkMultiTri() {
  qpu::SharedArray<int> a(64);
  for (int i = 0; i < 64; ++i) a[i] = i;
  auto k = qpu::compile(tutorial::multiTri, "multiTri");
  k.setNumQPUs(4);
  k(&a);
  for (int i = 0; i < 64; ++i)
    if (a[i] != triangular(i))
      return difference("tri(" + std::to_string(i) + ")", a[i], triangular(i));
  return {};
}

std::string checkDma() {
  qpu::SharedArray<int> a(256);
  for (int i = 0; i < 256; ++i) a[i] = i;
  qpu::compile(tutorial::dmaTri, "dmaTri")(&a);
  for (int i = 0; i < 256; ++i)
    if (a[i] != triangular(i))
      return difference("tri(" + std::to_string(i) + ")", a[i], triangular(i));
  return {};
}

std::string checkSort() {
  qpu::SharedArray<int> a(32);
  for (int i = 0; i < 32; ++i) a[i] = 31 * i % 37 - 18;
  qpu::compile(tutorial::oddEvenSort, "oddEvenSort")(&a);
  for (int i = 1; i < 32; ++i) {
    const int before = a[(i - 1) / 2 + 16 * ((i - 1) % 2)];
    const int here = a[i / 2 + 16 * (i % 2)];
    if (before > here) return difference("sorted element " + std::to_string(i), here, before);
  }
  return {};
}

std::string checkRotation(int qpus) {
  const int n = 16 * 50;
  qpu::SharedArray<float> x(n), y(n);
  for (int i = 0; i < n; ++i) {
    x[i] = static_cast<float>(i);
    y[i] = static_cast<float>(n - i);
  }
  const float c = std::cos(0.5F);
  const float s = std::sin(0.5F);
  auto k = qpu::compile(tutorial::rot3D3, "rot3D3");
  k.setNumQPUs(qpus);
  k(n, c, s, &x, &y);
  for (int i = 0; i < n; ++i) {
    const float expected = static_cast<float>(i) * c - static_cast<float>(n - i) * s;
    if (std::fabs(x[i] - expected) > 1e-3F)
      return difference("x " + std::to_string(i), x[i], expected);
  }
  return {};
}

std::string checkBounds() {
  qpu::SharedArray<int> a(16);
  const std::string backend = qpu::backend().name;
  if (backend != "interpreter" && backend != "emulator") return {};
  try {
    qpu::compile([](Ptr<Int> p) { p[1] = 0; }, "overrun")(&a);
  } catch (const qpu::BoundsError&) {
    return {};
  }
  return "a store past the end of an array was not detected";
}

}  // namespace

int main() {
  struct Named {
    const char* name;
    Check check;
  };
  const std::vector<Named> checks = {
      {"greatest common divisors: Where inside While", checkGcd},
      {"triangular numbers on 4 QPUs", checkMultiTri},
      {"triangular numbers through the VPM", checkDma},
      {"odd-even sort: rotation of vectors", checkSort},
      {"rotation of vertices on 1 QPU: gather and store", [] { return checkRotation(1); }},
      {"rotation of vertices on 12 QPUs", [] { return checkRotation(12); }},
      {"a store outside all arrays is rejected", checkBounds},
  };
  try {
    const qpu::Backend backend = qpu::backend();
    (void)std::printf("libqpu %s, backend %s: %s\n", qpu::version(), backend.name,
                      backend.reason);
  } catch (const std::exception& e) {
    (void)std::fprintf(stderr, "qpu-selftest: %s\n", e.what());
    return 1;
  }
  std::size_t failed = 0;
  for (const Named& c : checks) {
    std::string fault;
    try {
      fault = c.check();
    } catch (const std::exception& e) {
      fault = e.what();
    }
    if (!fault.empty()) ++failed;
    (void)std::printf("%s  %s%s%s\n", fault.empty() ? "ok  " : "FAIL", c.name,
                      fault.empty() ? "" : ": ", fault.c_str());
  }
  (void)std::printf("%zu of %zu checks passed\n", checks.size() - failed, checks.size());
  return failed == 0 ? 0 : 1;
}
