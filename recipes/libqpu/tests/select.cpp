// The front half of the compiler: its machine operations against the interpreter.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "compiler/compile.hpp"
#include "compiler/mir_text.hpp"
#include "tests/mir_run.hpp"
#include "tests/trace.hpp"
#include "tutorial/gcd.hpp"
#include "tutorial/heatmap.hpp"
#include "tutorial/mandelbrot.hpp"
#include "tutorial/memory.hpp"
#include "tutorial/oet.hpp"
#include "tutorial/rot3d.hpp"
#include "tutorial/tri.hpp"

namespace {

using qpu::compiler::Function;

std::uint32_t word(int x) { return static_cast<std::uint32_t>(x); }
std::uint32_t word(float x) { return qpu::detail::Argument<qpu::Float>::uniform(x); }
template <typename T>
std::uint32_t word(SharedArray<T>* a) { return a->getAddress(); }

bool verbose() { return std::getenv("SELECT_VERBOSE") != nullptr; }

// The sound machine operations of f.
template <typename F>
Function selected(F f, int level) {
  qpu::compiler::Options options;
  options.level = level;
  Function function = qpu::compiler::select(test::trace(f), options);
  if (verbose()) std::cout << "level " << level << " " << text(function);
  CHECK(check(function) == "");
  return function;
}

// Runs f's operations on 1..12 QPUs at every level and checks that `array` ends
// as after a run of the interpreter. `reset` gives every run the same start.
template <typename T, typename R, typename F, typename... A>
void same(SharedArray<T>& array, R reset, F f, A... arguments) {
  for (const int qpus : {1, 2, 3, 7, 12}) {
    CAPTURE(qpus);
    reset();
    auto kernel = qpu::compile(f, "test");
    kernel.setNumQPUs(qpus);
    kernel(arguments...);
    std::vector<std::uint32_t> expected(array.size());
    std::memcpy(expected.data(), array.data(), 4 * expected.size());
    for (int level = 0; level <= 2; ++level) {
      CAPTURE(level);
      const Function function = selected(f, level);
      reset();
      try {
        test::MirMachine(function, qpus, {word(arguments)...}).run();
      } catch (const std::exception& e) {
        FAIL(e.what() << "\n" << text(function));
      }
      CHECK(std::memcmp(expected.data(), array.data(), 4 * expected.size()) == 0);
    }
  }
}

}  // namespace

TEST_CASE("Hello") {
  SharedArray<int> a(12 * 16);
  same(a, [&] { std::fill(a.begin(), a.end(), 0); }, tutorial::hello, &a);
}

TEST_CASE("ReqRecv") {
  SharedArray<int> a(64);
  const auto reset = [&] {
    for (int i = 0; i < 64; ++i) a[i] = i < 32 ? i * i : 0;
  };
  same(a, reset, tutorial::reqRecv, &a);
}

TEST_CASE("GCD") {
  SharedArray<int> a(16), b(16), r(16);
  for (int i = 0; i < 16; ++i) {
    a[i] = 100 + 7 * i % 31;
    b[i] = 100 + 11 * i % 37;
  }
  const auto reset = [&] { std::fill(r.begin(), r.end(), 0); };
  same(r, reset, tutorial::gcd, &a, &b, &r);
  same(r, reset, tutorial::gcdUnrolled, &a, &b, &r);
}

TEST_CASE("Tri") {
  SharedArray<int> a(12 * 16);
  const auto reset = [&] {
    for (int i = 0; i < 12 * 16; ++i) a[i] = i;
  };
  same(a, reset, tutorial::multiTri, &a);
  SharedArray<float> f(16);
  const auto resetFloats = [&] {
    for (int i = 0; i < 16; ++i) f[i] = static_cast<float>(i) + 0.75F;
  };
  same(f, resetFloats, [](Ptr<Float> p) {
    If (any(me() == 0))
      tutorial::triFloat(p);
    End
  }, &f);
}

TEST_CASE("OET") {
  SharedArray<int> a(32);
  const auto reset = [&] {
    for (int i = 0; i < 32; ++i) a[i] = i * 37 % 23 - 4;
  };
  same(a, reset, tutorial::oddEvenSort, &a);
}

TEST_CASE("Rot3D") {
  const int n = 16 * 41;
  SharedArray<float> xy(2 * n + 12 * 16), y(static_cast<std::size_t>(n) + 12 * 16);
  const auto reset = [&] {
    for (std::size_t i = 0; i < xy.size(); ++i) xy[i] = static_cast<float>(i);
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<float>(n) - 2.0F * static_cast<float>(i);
  };
  same(xy, reset, tutorial::rot3D3, n, std::cos(0.3F), std::sin(0.3F), &xy, &y);
}

TEST_CASE("HeatMap") {
  const int width = 32, height = 13, pitch = 16 + width + 32;
  SharedArray<float> map((height + 2) * pitch), out((height + 2) * pitch);
  for (std::size_t i = 0; i < map.size(); ++i) map[i] = static_cast<float>(i * 7919 % 256);
  const auto reset = [&] { std::fill(out.begin(), out.end(), 0.0F); };
  same(out, reset, tutorial::heatStep, &map, &out, pitch, width, height);
}

TEST_CASE("Mandelbrot") {
  SharedArray<int> out(32 * 20);
  const auto reset = [&] { std::fill(out.begin(), out.end(), 0); };
  same(out, reset, tutorial::mandelbrot, -2.0F, -1.25F, 0.09F, 32, 20, 40, &out);
}
