// Compares the tutorial's kernels with plain C++. The tests use published inputs and outputs where
// such data exists.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "tutorial/add.hpp"
#include "tutorial/gcd.hpp"
#include "tutorial/heatmap.hpp"
#include "tutorial/mandelbrot.hpp"
#include "tutorial/memory.hpp"
#include "tutorial/oet.hpp"
#include "tutorial/product.hpp"
#include "tutorial/rot3d.hpp"
#include "tutorial/tri.hpp"

namespace {

struct Pair {
  int a, b, gcd;
};

// This table was published with QPULib. The inputs are 100 + rand() % 100 after srand(0) with
// glibc.
const std::vector<Pair> kPublishedGcds = {
    {183, 186, 3},  {177, 115, 1}, {193, 135, 1},  {186, 192, 6}, {149, 121, 1}, {162, 127, 1},
    {190, 159, 1},  {163, 126, 1}, {140, 126, 14}, {172, 136, 4}, {111, 168, 3}, {167, 129, 1},
    {182, 130, 26}, {162, 123, 3}, {167, 135, 1},  {129, 102, 3}};

template <typename K>
void checkGcds(const K& kernel) {
  SharedArray<int> a(16), b(16), r(16);
  for (int i = 0; i < 16; ++i) {
    a[i] = kPublishedGcds[static_cast<std::size_t>(i)].a;
    b[i] = kPublishedGcds[static_cast<std::size_t>(i)].b;
  }
  kernel(&a, &b, &r);
  for (int i = 0; i < 16; ++i) CHECK(r[i] == kPublishedGcds[static_cast<std::size_t>(i)].gcd);
}

}  // namespace

TEST_CASE("GCD gives the published table") { checkGcds(compile(tutorial::gcd)); }
TEST_CASE("GCD unrolled gives the published table") { checkGcds(compile(tutorial::gcdUnrolled)); }

#ifdef __GLIBC__
TEST_CASE("the published inputs of GCD come from glibc's rand") {
  srand(0);
  for (const Pair& p : kPublishedGcds) {
    CHECK(100 + rand() % 100 == p.a);
    CHECK(100 + rand() % 100 == p.b);
  }
}
#endif

TEST_CASE("Tri computes 16 triangular numbers") {
  SharedArray<int> a(16);
  for (int i = 0; i < 16; ++i) a[i] = 3 * i;
  compile(tutorial::tri)(&a);
  for (int i = 0; i < 16; ++i) CHECK(a[i] == 3 * i * (3 * i + 1) / 2);
}

TEST_CASE("MultiTri computes 64 triangular numbers on 4 QPUs") {
  SharedArray<int> a(64);
  for (int i = 0; i < 64; ++i) a[i] = i;
  auto k = compile(tutorial::multiTri);
  k.setNumQPUs(4);
  k(&a);
  for (int i = 0; i < 64; ++i) CHECK(a[i] == i * (i + 1) / 2);
}

TEST_CASE("TriFloat converts to integers and back") {
  SharedArray<float> a(16);
  for (int i = 0; i < 16; ++i) a[i] = static_cast<float>(i) + 0.75F;
  compile(tutorial::triFloat)(&a);
  for (int i = 0; i < 16; ++i) {
    const int expected = i * (i + 1) / 2;
    CHECK(a[i] == static_cast<float>(expected));
  }
}

TEST_CASE("DMATri works on 16 vectors in the VPM") {
  SharedArray<int> a(256);
  for (int i = 0; i < 256; ++i) a[i] = i;
  compile(tutorial::dmaTri)(&a);
  for (int i = 0; i < 256; ++i) CHECK(a[i] == i * (i + 1) / 2);
}

TEST_CASE("Hello writes QPU and element numbers") {
  SharedArray<int> a(12 * 16);
  auto k = compile(tutorial::hello);
  k.setNumQPUs(12);
  k(&a);
  for (int i = 0; i < 12 * 16; ++i) CHECK(a[i] == 100 * (i / 16) + i % 16);
}

TEST_CASE("ReqRecv receives gathers in request order") {
  SharedArray<int> a(64);
  for (int i = 0; i < 32; ++i) a[i] = i * i;
  compile(tutorial::reqRecv)(&a);
  for (int i = 0; i < 16; ++i) {
    const int first = i * i;
    const int second = (i + 16) * (i + 16);
    CHECK(a[32 + i] == first + second);
    CHECK(a[48 + i] == second - first);
  }
}

TEST_CASE("OET sorts 32 integers") {
  const auto k = compile(tutorial::oddEvenSort);
  srand(1);
  for (int run = 0; run < 20; ++run) {
    std::vector<int> row(32);
    for (int& x : row) x = run == 0 ? 0 : rand() % (run < 10 ? 8 : 1000) - 4;
    if (run == 1) std::iota(row.rbegin(), row.rend(), 0);
    SharedArray<int> a(32);
    for (int i = 0; i < 32; ++i) a[i / 2 + 16 * (i % 2)] = row[static_cast<std::size_t>(i)];
    k(&a);
    std::sort(row.begin(), row.end());
    for (int i = 0; i < 32; ++i)
      CHECK(a[i / 2 + 16 * (i % 2)] == row[static_cast<std::size_t>(i)]);
  }
}

namespace {

struct Vertices {
  explicit Vertices(int n) : x(static_cast<std::size_t>(n)), y(static_cast<std::size_t>(n)) {
    for (int i = 0; i < n; ++i) {
      x[i] = static_cast<float>(i);
      y[i] = static_cast<float>(2 * i - n);
    }
  }
  SharedArray<float> x, y;
};

template <typename K>
Vertices rotated(int n, const K& kernel) {
  Vertices v(n);
  kernel(n, std::cos(0.3F), std::sin(0.3F), &v.x, &v.y);
  return v;
}

}  // namespace

TEST_CASE("all Rot3D versions agree on any number of QPUs") {
  const int n = 16 * 123;
  const Vertices first = rotated(n, compile(tutorial::rot3D1));
  const Vertices start(n);
  for (int i = 0; i < n; ++i) {
    const double c = std::cos(0.3F);
    const double s = std::sin(0.3F);
    CHECK(first.x[i] == doctest::Approx(start.x[i] * c - start.y[i] * s).epsilon(1e-5));
    CHECK(first.y[i] == doctest::Approx(start.y[i] * c + start.x[i] * s).epsilon(1e-5));
  }
  const auto same = [&](const Vertices& v) {
    return std::equal(v.x.begin(), v.x.end(), first.x.begin()) &&
           std::equal(v.y.begin(), v.y.end(), first.y.begin());
  };
  CHECK(same(rotated(n, compile(tutorial::rot3D2))));
  auto dealt = compile(tutorial::rot3D3);
  for (int qpus = 1; qpus <= 12; ++qpus) {
    CAPTURE(qpus);
    dealt.setNumQPUs(qpus);
    CHECK(same(rotated(n, dealt)));
  }
}

namespace {

struct Grid {
  static constexpr int kWidth = 64;
  static constexpr int kHeight = 37;
  static constexpr int kPitch = 16 + kWidth + 16;

  Grid() : cells((kHeight + 2) * kPitch) {
    srand(2);
    for (int y = 1; y <= kHeight; ++y)
      for (int x = 16; x < 16 + kWidth; ++x)
        cells[y * kPitch + x] = static_cast<float>(rand() % 256);
  }
  SharedArray<float> cells;
};

std::vector<double> heatReference(const Grid& g) {
  std::vector<double> out(g.cells.size(), 0.0);
  const auto at = [&](int x, int y) { return static_cast<double>(g.cells[y * Grid::kPitch + x]); };
  for (int y = 1; y <= Grid::kHeight; ++y)
    for (int x = 16; x < 16 + Grid::kWidth; ++x) {
      double sum = -at(x, y);
      for (int dy = -1; dy <= 1; ++dy)
        for (int dx = -1; dx <= 1; ++dx) sum += at(x + dx, y + dy);
      out[static_cast<std::size_t>(y * Grid::kPitch + x)] =
          at(x, y) - 0.25 * (at(x, y) - sum * 0.125);
    }
  return out;
}

}  // namespace

TEST_CASE("HeatMap gives the reference result on any QPU count") {
  Grid start;
  const std::vector<double> expected = heatReference(start);
  auto k = compile(tutorial::heatStep);
  for (int qpus = 1; qpus <= 12; ++qpus) {
    CAPTURE(qpus);
    SharedArray<float> out(start.cells.size());
    k.setNumQPUs(qpus);
    k(&start.cells, &out, Grid::kPitch, Grid::kWidth, Grid::kHeight);
    for (std::size_t i = 0; i < expected.size(); ++i)
      CHECK(out[i] == doctest::Approx(expected[i]).epsilon(1e-5));
  }
}

TEST_CASE("Mandelbrot counts match single-precision C++") {
  const int width = 96;
  const int height = 50;
  const int limit = 64;
  const float left = -2.0F;
  const float top = -1.25F;
  // This step can be represented exactly, so that c does not depend on the rounding.
  const float step = 0.03125F;
  auto k = compile(tutorial::mandelbrot);
  std::vector<int> first;
  for (int qpus = 1; qpus <= 12; ++qpus) {
    SharedArray<int> out(width * height);
    k.setNumQPUs(qpus);
    k(left, top, step, width, height, limit, &out);
    if (first.empty()) first.assign(out.begin(), out.end());
    CAPTURE(qpus);
    CHECK(std::equal(first.begin(), first.end(), out.begin()));
  }
  int different = 0;
  for (int y = 0; y < height; ++y)
    for (int x = 0; x < width; ++x) {
      const float cr = left + static_cast<float>(x) * step;
      const float ci = top + static_cast<float>(y) * step;
      float re = 0;
      float im = 0;
      int count = 0;
      while (re * re + im * im <= 4.0F && count < limit) {
        const float t = re * re - im * im + cr;
        im = re * im * 2.0F + ci;
        re = t;
        ++count;
      }
      if (count != first[static_cast<std::size_t>(y * width + x)]) ++different;
    }
  // The host rounds to nearest and the QPU rounds toward zero. The counts therefore differ at the
  // boundary.
  CHECK(different <= width * height / 100);
}

TEST_CASE("all versions of vector addition are correct") {
  const auto check = [](auto kernel, int n, int qpus) {
    const auto words = static_cast<std::size_t>(std::max(n, 1));
    SharedArray<float> a(words), b(words), out(words);
    for (int i = 0; i < n; ++i) {
      a[i] = static_cast<float>(i);
      b[i] = static_cast<float>(2 * i + 1);
    }
    kernel.setNumQPUs(qpus);
    kernel(n, &out, &a, &b);
    for (int i = 0; i < n; ++i) REQUIRE(out[i] == static_cast<float>(3 * i + 1));
  };
  const auto waiting = compile(tutorial::addWaiting);
  const auto ahead = compile(tutorial::addAhead);
  const auto bursts = compile(tutorial::addBursts);
  for (const int qpus : {1, 5, 12}) {
    for (const int n : {0, 16, 64, 1600}) {
      check(waiting, n, qpus);
      check(ahead, n, qpus);
    }
    for (const int n : {0, 1, 16, 17, 63, 64, 65, 1000, 1600}) check(bursts, n, qpus);
  }
}

TEST_CASE("both versions of the matrix product are correct") {
  const int m = 12, n = 64, k = 48;
  SharedArray<float> a(m * k), b(k * n), c(m * n);
  for (int i = 0; i < m * k; ++i) a[i] = static_cast<float>(i % 7 - 3);
  for (int i = 0; i < k * n; ++i) b[i] = static_cast<float>(i % 5 - 2);
  const auto check = [&](auto kernel, int qpus) {
    for (float& x : c) x = 0.5F;
    kernel.setNumQPUs(qpus);
    kernel(m, n, k, &c, &a, &b);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < n; ++j) {
        float sum = 0;
        for (int l = 0; l < k; ++l) sum += a[i * k + l] * b[l * n + j];
        REQUIRE(c[i * n + j] == sum);
      }
  };
  const auto plain = compile(tutorial::productPlain);
  const auto tiled = compile(tutorial::productTiled);
  for (const int qpus : {1, 2, 5, 12}) {
    check(plain, qpus);
    check(tiled, qpus);
  }
}
