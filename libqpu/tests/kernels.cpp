// Compares the results of the kernel library with those of plain C++. The tests use sizes close to
// the block size and different numbers of QPUs, and check that no function writes outside the given
// ranges.
#include "qpu/kernels.h"
#include "qpu_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "interp/arith.hpp"
#include "tests/run.hpp"

namespace {

namespace k = qpu::kernels;
using qpu::interp::fadd;
using qpu::interp::fmul;
using test::bitsOf;
using test::floatOf;

constexpr float kInf = std::numeric_limits<float>::infinity();
const std::vector<int> kSizes = {0,  1,  2,  15, 16,  17,  31,  33,  63,  64,
                                 65, 79, 80, 81, 127, 128, 129, 768, 833, 2000};

std::mt19937& random() {
  static std::mt19937 generator(20240229);
  return generator;
}
int dice(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random()); }
float uniform(float low, float high) {
  return std::uniform_real_distribution<float>(low, high)(random());
}

// An array inside a larger array, whose other words must not change. The inner array starts at a
// random word of a 64-byte cache line.
class Guarded {
 public:
  explicit Guarded(int n, float low = -4, float high = 4)
      : n_(n), lead_(static_cast<std::size_t>(dice(0, 20))), all_(static_cast<std::size_t>(n) + lead_ + 24) {
    for (float& x : all_) x = kMark;
    for (int i = 0; i < n; ++i) (*this)[i] = uniform(low, high);
  }
  float& operator[](int i) { return all_[lead_ + static_cast<std::size_t>(i)]; }
  float operator[](int i) const { return all_[lead_ + static_cast<std::size_t>(i)]; }
  operator k::Floats() const { return all_.pointer(lead_); }
  std::vector<float> values() const {
    std::vector<float> v(static_cast<std::size_t>(n_));
    all_.copyTo(v.data(), v.size(), lead_);
    return v;
  }
  bool intact() const {
    for (std::size_t i = 0; i < all_.size(); ++i)
      if ((i < lead_ || i >= lead_ + static_cast<std::size_t>(n_)) && all_[i] != kMark) return false;
    return true;
  }

 private:
  static constexpr float kMark = 12345.5F;
  int n_;
  std::size_t lead_;
  SharedArray<float> all_;
};

// Returns an array that ends directly after its elements, so that reading beyond the elements is an
// error.
SharedArray<float> tight(int n, float low = -4, float high = 4) {
  SharedArray<float> a(static_cast<std::size_t>(std::max(n, 1)));
  for (float& x : a) x = uniform(low, high);
  return a;
}

float qadd(float a, float b) { return floatOf(fadd(bitsOf(a), bitsOf(b))); }
float qmul(float a, float b) { return floatOf(fmul(bitsOf(a), bitsOf(b))); }

double ulpOf(double exact) {
  return std::ldexp(1.0, std::ilogb(std::max(std::fabs(static_cast<float>(exact)), 0x1p-126F)) - 23);
}

// Runs `call` for every size in kSizes, with different numbers of QPUs. `call` writes its results
// to `out`.
template <typename Call, typename Expected>
void elementwise(Call call, Expected expected, double ulps = 0) {
  for (const int n : kSizes) {
    const SharedArray<float> a = tight(n), b = tight(n), c = tight(n);
    Guarded out(n);
    const int qpus = dice(1, 12);
    call(out, a, b, c, n, qpus);
    CHECK(out.intact());
    for (int i = 0; i < n; ++i) {
      const auto e = static_cast<double>(expected(a[i], b[i], c[i]));
      INFO("n " << n << ", element " << i << ", QPUs " << qpus);
      if (std::isnan(e))
        REQUIRE(std::isnan(out[i]));
      else if (ulps == 0)
        REQUIRE(out[i] == static_cast<float>(e));
      else
        REQUIRE(std::fabs(static_cast<double>(out[i]) - e) <= ulps * ulpOf(e));
    }
  }
}

using F = k::Floats;
using A = const SharedArray<float>&;

}  // namespace

TEST_CASE("elementwise sums and products round like the language") {
  elementwise([](F o, A a, A b, A, int n, int q) { k::add(o, a, b, n, q); },
              [](float a, float b, float) { return qadd(a, b); });
  elementwise([](F o, A a, A b, A, int n, int q) { k::sub(o, a, b, n, q); },
              [](float a, float b, float) { return qadd(a, -b); });
  elementwise([](F o, A a, A b, A, int n, int q) { k::mul(o, a, b, n, q); },
              [](float a, float b, float) { return qmul(a, b); });
  elementwise([](F o, A a, A b, A c, int n, int q) { k::fma(o, a, b, c, n, q); },
              [](float a, float b, float c) { return qadd(qmul(a, b), c); });
  elementwise([](F o, A a, A b, A, int n, int q) { k::axpy(o, 0.3F, a, b, n, q); },
              [](float a, float b, float) { return qadd(qmul(0.3F, a), b); });
  elementwise([](F o, A a, A, A, int n, int q) { k::scale(o, -1.7F, a, n, q); },
              [](float a, float, float) { return qmul(-1.7F, a); });
}

TEST_CASE("relu and clamp are exact") {
  elementwise([](F o, A a, A, A, int n, int q) { k::relu(o, a, n, q); },
              [](float a, float, float) { return a > 0 ? a : 0.0F; });
  elementwise([](F o, A a, A, A, int n, int q) { k::clamp(o, a, -1, 2.5F, n, q); },
              [](float a, float, float) { return std::min(std::max(a, -1.0F), 2.5F); });
}

TEST_CASE("exp, sqrt, sigmoid, tanh are within their bounds") {
  elementwise([](F o, A a, A, A, int n, int q) { k::exp(o, a, n, q); },
              [](float a, float, float) { return std::exp(static_cast<double>(a)); }, 4);
  elementwise([](F o, A a, A, A, int n, int q) { k::sqrt(o, a, n, q); },
              [](float a, float, float) { return std::sqrt(static_cast<double>(a)); }, 4);
  elementwise([](F o, A a, A, A, int n, int q) { k::sigmoid(o, a, n, q); },
              [](float a, float, float) { return 1 / (1 + std::exp(-static_cast<double>(a))); },
              8);
  elementwise([](F o, A a, A, A, int n, int q) { k::tanh(o, a, n, q); },
              [](float a, float, float) { return std::tanh(static_cast<double>(a)); }, 8);
}

TEST_CASE("elementwise kernels treat NaN and Inf as IEEE 754 does") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> special = {nan, -nan, kInf, -kInf, -2, 0, 3};
  const auto n = static_cast<int>(special.size());
  const auto check = [&](const char* name, auto call, auto expected) {
    SharedArray<float> a(special.size()), out(special.size());
    for (std::size_t i = 0; i < special.size(); ++i) a[i] = special[i];
    call(out, a);
    for (std::size_t i = 0; i < special.size(); ++i) {
      const float e = expected(special[i]);
      INFO(name << " of " << special[i] << " gives " << out[i]);
      CHECK(std::isnan(out[i]) == std::isnan(e));
      CHECK(std::isinf(out[i]) == std::isinf(e));
      if (std::isfinite(e)) CHECK(out[i] == doctest::Approx(e));
    }
  };
  check("relu", [n](F o, A a) { k::relu(o, a, n); },
        [](float x) { return std::isnan(x) ? x : std::max(x, 0.0F); });
  check("clamp", [n](F o, A a) { k::clamp(o, a, -1, 2, n); },
        [](float x) { return std::isnan(x) ? x : std::min(std::max(x, -1.0F), 2.0F); });
  check("exp", [n](F o, A a) { k::exp(o, a, n); }, [](float x) { return std::exp(x); });
  check("sqrt", [n](F o, A a) { k::sqrt(o, a, n); }, [](float x) { return std::sqrt(x); });
  check("sigmoid", [n](F o, A a) { k::sigmoid(o, a, n); },
        [](float x) { return 1 / (1 + std::exp(-x)); });
  check("tanh", [n](F o, A a) { k::tanh(o, a, n); }, [](float x) { return std::tanh(x); });
}

TEST_CASE("elementwise kernels work in place and on subarrays") {
  for (const int n : {5, 64, 300, 1000}) {
    Guarded a(n), b(n);
    const std::vector<float> before = a.values();
    k::add(a, a, b, n, 7);
    k::scale(b, 2, b, n, 12);
    CHECK(a.intact());
    CHECK(b.intact());
    for (int i = 0; i < n; ++i) CHECK(a[i] == qadd(before[static_cast<std::size_t>(i)], b[i] / 2));
  }
}

TEST_CASE("sums are within bounds and independent of QPU count") {
  for (const int n : kSizes) {
    const SharedArray<float> a = tight(n), b = tight(n);
    double sum = 0, sizes = 0, dot = 0, products = 0, squares = 0;
    for (int i = 0; i < n; ++i) {
      const auto x = static_cast<double>(a[i]);
      const auto y = static_cast<double>(b[i]);
      sum += x;
      sizes += std::fabs(x);
      dot += x * y;
      products += std::fabs(x * y);
      squares += x * x;
    }
    INFO("n " << n);
    const float s = k::sum(a, n, 1);
    const float d = k::dot(a, b, n, 1);
    const float l = k::norm(a, n, 1);
    CHECK(std::fabs(static_cast<double>(s) - sum) <= 4 * ulpOf(sizes));
    CHECK(std::fabs(static_cast<double>(d) - dot) <= 5 * ulpOf(products));
    CHECK(std::fabs(static_cast<double>(l) - std::sqrt(squares)) <= 5 * ulpOf(std::sqrt(squares)));
    for (int q = 2; q <= 12; ++q) {
      CHECK(k::sum(a, n, q) == s);
      CHECK(k::dot(a, b, n, q) == d);
      CHECK(k::norm(a, n, q) == l);
    }
  }
}

TEST_CASE("the error of a long sum of positive numbers is bounded") {
  const int n = 200000;
  SharedArray<float> a(n);
  double sum = 0;
  for (float& x : a) {
    x = uniform(0.5F, 1.5F);
    sum += static_cast<double>(x);
  }
  CHECK(std::fabs(static_cast<double>(k::sum(a, n)) - sum) <= 4 * ulpOf(sum));
  a[1000] = kInf;
  CHECK(k::sum(a, n) == kInf);
  a[1000] = -kInf;
  CHECK(k::sum(a, n) == -kInf);
}

TEST_CASE("max and argmax find the first greatest element") {
  for (const int n : kSizes) {
    if (n == 0) continue;
    SharedArray<float> a = tight(n);
    for (int round = 0; round < 4; ++round) {
      // Use few distinct values, so that some elements are equal.
      if (round == 2)
        for (float& x : a) x = static_cast<float>(dice(-3, 0));
      if (round == 3) a[dice(0, n - 1)] = kInf;
      int best = 0;
      for (int i = 1; i < n; ++i)
        if (a[i] > a[best]) best = i;
      INFO("n " << n << ", round " << round);
      for (int q = 1; q <= 12; q += round == 0 ? 1 : 4) {
        CHECK(k::max(a, n, q) == a[best]);
        CHECK(k::argmax(a, n, q) == best);
      }
    }
  }
}

TEST_CASE("max and argmax treat -0 and 0 as equal") {
  SharedArray<float> a(4);
  for (const auto& values : std::vector<std::vector<float>>{
           {-0.0F, 0, -1, -0.0F}, {-1, -0.0F, 0, 0}, {-3, -2, -1, -0.0F}, {-3, -1, -1, -2}}) {
    a.copyFrom(values.data(), values.size());
    const auto best = std::max_element(values.begin(), values.end());
    CHECK(k::max(a, 4) == *best);
    CHECK(k::argmax(a, 4) == static_cast<int>(best - values.begin()));
  }
}

TEST_CASE("an empty sum is 0, an empty maximum is an error") {
  CHECK(k::sum(nullptr, 0) == 0);
  CHECK(k::dot(nullptr, nullptr, 0) == 0);
  CHECK(k::norm(nullptr, 0) == 0);
  CHECK(test::contains(test::thrown<qpu::ArgumentError>([] { k::max(nullptr, 0); }),
                       "kernels::max: n is 0, but must be at least 1"));
}

TEST_CASE("ranges outside of arrays are rejected before running") {
  SharedArray<float> a(64), b(64);
  const auto refused = [](auto f) { return test::thrown<qpu::ArgumentError>(f); };
  CHECK(test::contains(refused([&] { k::add(a, b, b, 65); }),
                       "kernels::add: out: 65 elements from "));
  CHECK(test::contains(refused([&] { k::add(a, b.pointer(1), b, 64); }), "a: 64 elements"));
  CHECK(test::contains(refused([&] { k::add(a, b, nullptr, 64); }), "b is null"));
  CHECK(test::contains(refused([&] { k::add(a, b, b, -1); }), "n is -1, but must be at least 0"));
  CHECK(test::contains(refused([&] { k::relu(a, F::fromAddress(b.getAddress() + 2), 3); }),
                       "not a multiple of 4"));
  CHECK(test::contains(refused([&] { k::sum(F::fromAddress(64), 1); }), "nearest is"));
  CHECK(test::contains(refused([&] { k::add(a, b, b, 64, 13); }), "12 QPUs"));
  CHECK_NOTHROW(k::add(nullptr, nullptr, nullptr, 0));
  CHECK_NOTHROW(k::add(a, b.getPointer(), &b, 64));
}

namespace {

// Returns the error bound for a sum of these products that is computed with `adds` truncated
// additions.
double chainBound(int adds, double products) { return (adds + 2) * 0x1p-23 * products + 1e-37; }

struct Shape {
  int m, n, k;
};

// A matrix in a guarded array, with a gap between its rows.
struct TestMatrix {
  int rows, columns, stride;
  bool transposed;
  Guarded data;

  TestMatrix(int m, int n, bool transpose = false)
      : rows(m), columns(n), stride(std::max(transpose ? m : n, 1) + dice(0, 3)),
        transposed(transpose), data(extent(m, n)) {}
  int extent(int m, int n) const {
    const int lines = transposed ? n : m;
    return m == 0 || n == 0 ? 0 : (lines - 1) * stride + (transposed ? m : n);
  }
  int place(int i, int j) const { return transposed ? j * stride + i : i * stride + j; }
  float at(int i, int j) const { return data[place(i, j)]; }
  k::Matrix view() const {
    return transposed ? k::Matrix(data, 1, stride) : k::Matrix(data, stride);
  }
};

void checkMatvec(int m, int n, bool transposed = false) {
  const TestMatrix a(m, n, transposed);
  const SharedArray<float> x = tight(n);
  Guarded y(m), again(m);
  const int qpus = dice(1, 12);
  k::matvec(y, a.view(), x, m, n, qpus);
  k::matvec(again, a.view(), x, m, n, 13 - qpus);
  CHECK(y.intact());
  CHECK(y.values() == again.values());
  for (int i = 0; i < m; ++i) {
    double sum = 0, products = 0;
    for (int j = 0; j < n; ++j) {
      const double p = static_cast<double>(a.at(i, j)) * static_cast<double>(x[j]);
      sum += p;
      products += std::fabs(p);
    }
    INFO(m << " x " << n << ", row " << i << ", QPUs " << qpus);
    REQUIRE(std::fabs(static_cast<double>(y[i]) - sum) <= chainBound(n + 16, products));
  }
}

// If `qpus` is 0, a random number of QPUs is used.
void checkMatmul(const Shape& s, bool transposeA = false, bool transposeB = false, int qpus = 0) {
  const TestMatrix a(s.m, s.k, transposeA), b(s.k, s.n, transposeB);
  TestMatrix c(s.m, s.n), again(s.m, s.n);
  if (qpus == 0) qpus = dice(1, 12);
  const float alpha = dice(0, 1) == 0 ? 1 : uniform(-2, 2);
  const float beta = dice(0, 1) == 0 ? 0 : uniform(-2, 2);
  std::vector<double> old(static_cast<std::size_t>(s.m * s.n));
  std::vector<float> gaps = c.data.values();
  for (int i = 0; i < s.m; ++i)
    for (int j = 0; j < s.n; ++j) {
      again.data[again.place(i, j)] = c.at(i, j);
      old[static_cast<std::size_t>(i * s.n + j)] = static_cast<double>(c.at(i, j));
    }
  k::matmul(c.view(), a.view(), b.view(), s.m, s.n, s.k, alpha, beta, qpus);
  k::matmul(again.view(), a.view(), b.view(), s.m, s.n, s.k, alpha, beta, 13 - qpus);
  CHECK(c.data.intact());
  for (int i = 0; i < s.m; ++i)
    for (int j = 0; j < s.n; ++j) {
      double sum = 0, products = 0;
      for (int l = 0; l < s.k; ++l) {
        const double p = static_cast<double>(a.at(i, l)) * static_cast<double>(b.at(l, j));
        sum += p;
        products += std::fabs(p);
      }
      const double before =
          static_cast<double>(beta) * old[static_cast<std::size_t>(i * s.n + j)];
      sum = static_cast<double>(alpha) * sum + before;
      products = std::fabs(static_cast<double>(alpha)) * products + std::fabs(before);
      INFO(s.m << " x " << s.n << " x " << s.k << ", element " << i << ", " << j << ", QPUs "
               << qpus);
      REQUIRE(std::fabs(static_cast<double>(c.at(i, j)) - sum) <= chainBound(s.k + 2, products));
      REQUIRE(c.at(i, j) == again.at(i, j));
      gaps[static_cast<std::size_t>(c.place(i, j))] = c.at(i, j);
    }
  CHECK(c.data.values() == gaps);
}

}  // namespace

TEST_CASE("matvec works for any shape") {
  for (const int m : {0, 1, 7, 8, 9, 100})
    for (const int n : {0, 1, 15, 16, 17, 127, 128, 129, 1000}) checkMatvec(m, n);
  for (int i = 0; i < 60; ++i) checkMatvec(dice(1, 40), dice(1, 600), i % 4 == 3);
  checkMatvec(13, 20000);
}

TEST_CASE("matmul works for any shape, stride and beta") {
  for (const int m : {1, 8, 9})
    for (const int n : {1, 16, 63, 64, 65})
      for (const int l : {0, 1, 15, 16, 17, 33}) checkMatmul({m, n, l});
  for (int i = 0; i < 120; ++i)
    checkMatmul({dice(1, 40), dice(1, 150), dice(1, 70)}, dice(0, 2) == 0, dice(0, 2) == 0);
  checkMatmul({100, 100, 100});
  // These products are so wide that `a` is copied.
  for (int i = 0; i < 6; ++i)
    checkMatmul({dice(8, 50), dice(256, 300), dice(64, 100)}, i % 2 == 0, i % 3 == 0);
}

// With all QPUs, most of the product is computed by a separate kernel in which the first QPU
// loads b. With one QPU, this kernel is not used.
TEST_CASE("matmul gives the same bits on one and on all QPUs") {
  for (const int m : {65, 66, 88, 95, 154})
    for (const int l : {15, 16, 17, 24, 37}) checkMatmul({m, 64, l}, false, false, 12);
  for (int i = 0; i < 6; ++i)
    checkMatmul({dice(66, 190), dice(64, 200), dice(16, 60)}, false, i % 3 == 2, 12);
  // Some QPUs have no tile, and therefore reach the next column early.
  for (const int l : {16, 17, 32, 40, 48})
    for (int i = 0; i < 3; ++i) checkMatmul({66, 192, l}, false, false, 12);
  // The rows of b are so far apart that one DMA transfer cannot load several of them.
  checkMatmul({67, 2100, 20}, false, false, 12);
}

TEST_CASE("matmul rejects invalid shapes") {
  SharedArray<float> a(64);
  const auto refused = [](auto f) { return test::thrown<qpu::ArgumentError>(f); };
  const k::Matrix square(a, 8);
  CHECK(test::contains(refused([&] { k::matmul(square, square, square, 8, 8, 9); }),
                       "kernels::matmul: a: 65 elements"));
  CHECK(test::contains(refused([&] { k::matmul(k::Matrix(a, 4), square, square, 8, 8, 8); }),
                       "c's row stride is 4, but must be at least "));
  CHECK(test::contains(refused([&] { k::matmul(k::Matrix(a, 1, 8), square, square, 8, 8, 8); }),
                       "c's column stride must be 1"));
  CHECK(test::contains(refused([&] { k::matmul(square, square, square, 8, -8, 8); }), "n is -8"));
  CHECK_NOTHROW(k::matmul(k::Matrix(nullptr, 0), square, square, 0, 8, 8));
}

namespace {

void checkSoftmax(int rows, int columns) {
  const int stride = columns + dice(0, 5);
  const int extent = rows == 0 ? 0 : (rows - 1) * stride + columns;
  const Guarded a(extent, -20, 20);
  Guarded out(extent), again(extent);
  std::vector<float> gaps = out.values();
  const int qpus = dice(1, 12);
  k::softmax(out, a, rows, columns, stride, qpus);
  k::softmax(again, a, rows, columns, stride, 13 - qpus);
  CHECK(out.intact());
  for (int i = 0; i < rows; ++i) {
    double most = -1e30, sum = 0;
    for (int j = 0; j < columns; ++j) most = std::max(most, static_cast<double>(a[i * stride + j]));
    for (int j = 0; j < columns; ++j) sum += std::exp(static_cast<double>(a[i * stride + j]) - most);
    for (int j = 0; j < columns; ++j) {
      const int at = i * stride + j;
      const double x = static_cast<double>(a[at]) - most;
      const double e = std::exp(x) / sum;
      INFO(rows << " x " << columns << ", element " << i << ", " << j << ", QPUs " << qpus);
      REQUIRE(std::fabs(static_cast<double>(out[at]) - e) <= (24 - x) * ulpOf(e));
      REQUIRE(out[at] == again[at]);
      gaps[static_cast<std::size_t>(at)] = out[at];
    }
  }
  CHECK(out.values() == gaps);
}

k::Window randomWindow() {
  k::Window w;
  w.batch = dice(1, 3);
  w.channels = dice(1, 5);
  w.kernelHeight = dice(1, 4);
  w.kernelWidth = dice(1, 4);
  w.strideY = dice(1, 3);
  w.strideX = dice(1, 3);
  w.dilationY = dice(1, 2);
  w.dilationX = dice(1, 2);
  w.paddingY = dice(0, w.kernelHeight / 2);
  w.paddingX = dice(0, w.kernelWidth / 2);
  w.height = w.dilationY * w.kernelHeight + dice(0, 12);
  w.width = w.dilationX * w.kernelWidth + dice(0, 25);
  return w;
}

// Calls `get` for each element that is under the window for output pixel (oy, ox) and inside the
// image. Passes the element's index in the image and its index in the kernel.
template <typename Get>
void overWindow(const k::Window& w, int b, int c, int oy, int ox, Get get) {
  for (int y = 0; y < w.kernelHeight; ++y)
    for (int x = 0; x < w.kernelWidth; ++x) {
      const int iy = oy * w.strideY - w.paddingY + y * w.dilationY;
      const int ix = ox * w.strideX - w.paddingX + x * w.dilationX;
      if (iy >= 0 && iy < w.height && ix >= 0 && ix < w.width)
        get(((b * w.channels + c) * w.height + iy) * w.width + ix, y * w.kernelWidth + x);
    }
}

void checkConv(const k::Window& w, int outChannels) {
  const SharedArray<float> a = tight(w.batch * w.channels * w.height * w.width);
  const int area = w.kernelHeight * w.kernelWidth;
  const int depth = w.channels / w.groups;
  const int width = outChannels / w.groups;
  const SharedArray<float> weights = tight(outChannels * depth * area);
  const SharedArray<float> bias = tight(outChannels);
  const bool biased = dice(0, 1) == 1;
  const int pixels = w.outHeight() * w.outWidth();
  Guarded out(w.batch * outChannels * pixels), again(w.batch * outChannels * pixels);
  const int qpus = dice(1, 12);
  const k::Floats b = biased ? k::Floats(bias) : k::Floats(nullptr);
  k::conv2d(out, a, weights, b, w, outChannels, qpus);
  k::conv2d(again, a, weights, b, w, outChannels, 13 - qpus);
  CHECK(out.intact());
  CHECK(out.values() == again.values());
  int at = 0;
  for (int i = 0; i < w.batch; ++i)
    for (int o = 0; o < outChannels; ++o)
      for (int y = 0; y < w.outHeight(); ++y)
        for (int x = 0; x < w.outWidth(); ++x, ++at) {
          double sum = biased ? static_cast<double>(bias[o]) : 0;
          double products = std::fabs(sum);
          for (int c = 0; c < depth; ++c)
            overWindow(w, i, o / width * depth + c, y, x, [&](int element, int place) {
              const double p = static_cast<double>(a[element]) *
                               static_cast<double>(weights[(o * depth + c) * area + place]);
              sum += p;
              products += std::fabs(p);
            });
          REQUIRE(std::fabs(static_cast<double>(out[at]) - sum) <=
                  chainBound(depth * area + 1, products));
        }
}

void checkPool(const k::Window& w) {
  const SharedArray<float> a = tight(w.batch * w.channels * w.height * w.width);
  const int pixels = w.outHeight() * w.outWidth();
  Guarded out(w.batch * w.channels * pixels);
  k::maxPool2d(out, a, w, dice(0, 12));
  CHECK(out.intact());
  int at = 0;
  for (int i = 0; i < w.batch; ++i)
    for (int c = 0; c < w.channels; ++c)
      for (int y = 0; y < w.outHeight(); ++y)
        for (int x = 0; x < w.outWidth(); ++x, ++at) {
          float most = -kInf;
          overWindow(w, i, c, y, x, [&](int element, int) { most = std::max(most, a[element]); });
          REQUIRE(out[at] == most);
        }
}

void checkBatchNorm(int batch, int channels, int size) {
  const int n = batch * channels * size;
  const SharedArray<float> a = tight(n), mean = tight(channels), weight = tight(channels),
                           bias = tight(channels), variance = tight(channels, 0.1F, 3);
  Guarded out(n), again(n);
  const bool affine = dice(0, 1) == 1;
  const k::Floats none(nullptr);
  const int qpus = dice(1, 12);
  const auto call = [&](Guarded& to, int q) {
    k::batchNorm(to, a, mean, variance, affine ? k::Floats(weight) : none,
                 affine ? k::Floats(bias) : none, 1e-5F, batch, channels, size, q);
  };
  call(out, qpus);
  call(again, 13 - qpus);
  CHECK(out.intact());
  CHECK(out.values() == again.values());
  for (int i = 0; i < n; ++i) {
    const int c = i / size % channels;
    const double scale = (affine ? static_cast<double>(weight[c]) : 1) /
                         std::sqrt(static_cast<double>(variance[c]) + 1e-5);
    const double product =
        (static_cast<double>(a[i]) - static_cast<double>(mean[c])) * scale;
    const double e = product + (affine ? static_cast<double>(bias[c]) : 0);
    INFO(batch << " x " << channels << " x " << size << ", element " << i);
    REQUIRE(std::fabs(static_cast<double>(out[i]) - e) <= 9 * ulpOf(product) + ulpOf(e));
  }
}

}  // namespace

TEST_CASE("softmax works for any shape") {
  for (const int columns : {0, 1, 15, 16, 17, 63, 64, 65, 128, 300, 1000})
    for (const int rows : {0, 1, 5, 13}) checkSoftmax(rows, columns);
  // In one row, one element is much less than the other elements. The other rows contain equal
  // values.
  SharedArray<float> a(70), out(70);
  for (float& x : a) x = 1000;
  a[3] = -kInf;
  k::softmax(out, a, 1, 70, 70);
  CHECK(out[3] == 0);
  CHECK(out[69] == doctest::Approx(1.0 / 69));
}

TEST_CASE("softmax gives NaN only in rows with NaN, +Inf or all -Inf") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  for (const int columns : {1, 20, 64, 65, 200}) {
    for (const float special : {nan, -nan, kInf, -kInf}) {
      const auto size = static_cast<std::size_t>(2 * columns);
      SharedArray<float> a(size), out(size);
      for (float& x : a) x = uniform(-4, 4);
      const int first = special == -kInf ? 0 : columns - 1;
      for (int i = first; i < columns; ++i) a[static_cast<std::size_t>(i)] = special;
      k::softmax(out, a, 2, columns, columns);
      INFO(special << " among " << columns);
      double sum = 0;
      for (int i = 0; i < columns; ++i) {
        CHECK(std::isnan(out[static_cast<std::size_t>(i)]));
        sum += static_cast<double>(out[static_cast<std::size_t>(columns + i)]);
      }
      CHECK(sum == doctest::Approx(1));
    }
  }
}

TEST_CASE("conv2d works for any shape") {
  for (int i = 0; i < 80; ++i) checkConv(randomWindow(), dice(1, 12));
  k::Window w;
  w.channels = 3;
  w.height = w.width = 20;
  w.kernelHeight = w.kernelWidth = 3;
  w.paddingY = w.paddingX = 1;
  checkConv(w, 17);
}

TEST_CASE("conv2d works in groups") {
  for (int i = 0; i < 20; ++i) {
    k::Window w = randomWindow();
    w.groups = dice(2, 4);
    w.channels *= w.groups;
    checkConv(w, w.groups * dice(1, 4));
  }
  // A depthwise convolution has one group per channel.
  k::Window w;
  w.channels = w.groups = 6;
  w.height = w.width = 9;
  w.kernelHeight = w.kernelWidth = 3;
  w.paddingY = w.paddingX = 1;
  checkConv(w, 6);
  SharedArray<float> a(6 * 81), weights(6 * 9), out(6 * 81);
  const auto refused = [&](int groups, int outChannels) {
    return test::thrown<qpu::ArgumentError>([&] {
      w.groups = groups;
      k::conv2d(out, a, weights, nullptr, w, outChannels);
    });
  };
  CHECK(test::contains(refused(4, 4), "6 channels cannot be divided into 4 groups"));
  CHECK(test::contains(refused(3, 4), "4 output channels cannot be divided into 3 groups"));
  CHECK(test::contains(refused(0, 6), "groups is 0, but must be at least 1"));
}

TEST_CASE("maxPool2d works for any shape") {
  for (int i = 0; i < 80; ++i) checkPool(randomWindow());
}

TEST_CASE("batchNorm works for any shape") {
  for (int i = 0; i < 40; ++i) checkBatchNorm(dice(0, 4), dice(1, 20), dice(0, 200));
  checkBatchNorm(1, 3, 3000);
}

TEST_CASE("invalid windows are rejected") {
  SharedArray<float> a(64);
  const auto refused = [&](auto change) {
    k::Window w;
    w.height = w.width = 8;
    change(w);
    return test::thrown<qpu::ArgumentError>([&] { k::maxPool2d(a, a, w); });
  };
  CHECK(test::contains(refused([](k::Window& w) { w.kernelHeight = 9; }),
                       "the kernel is larger than the padded image"));
  CHECK(test::contains(refused([](k::Window& w) { w.strideX = 0; }),
                       "strideX is 0, but must be at least 1"));
  CHECK(test::contains(refused([](k::Window& w) { w.height = 9; }), "out: 72 elements"));
  CHECK(test::contains(refused([](k::Window& w) { w.paddingX = -1; }), "paddingX is -1"));
  CHECK(test::contains(refused([](k::Window& w) { w.channels = 0; }), "channels is 0"));
}

TEST_CASE("the C functions compute the same and report errors") {
  const int n = 100;
  SharedArray<float> a = tight(n), b = tight(n), out(n), expected(n);
  float* const p = out.getPointer();
  k::add(expected, a, b, n);
  CHECK(qpu_add(p, a.getPointer(), b.getPointer(), n, 0) == 0);
  for (int i = 0; i < n; ++i) CHECK(out[i] == expected[i]);
  float result = 0;
  int number = -1;
  CHECK(qpu_dot(&result, a.getPointer(), b.getPointer(), n, 5) == 0);
  CHECK(result == k::dot(a, b, n));
  CHECK(qpu_argmax(&number, a.getPointer(), n, 5) == 0);
  CHECK(number == k::argmax(a, n));
  const qpu_matrix square = {a.getPointer(), 10, 1};
  CHECK(qpu_matmul({p, 10, 1}, square, square, 10, 10, 10, 1, 0, 0) == 0);
  k::matmul(k::Matrix(expected, 10), k::Matrix(a, 10), k::Matrix(a, 10), 10, 10, 10);
  for (int i = 0; i < n; ++i) CHECK(out[i] == expected[i]);
  CHECK(qpu_add(p, p, p, -1, 0) == -1);
  CHECK(test::contains(qpu_last_error(), "n is -1"));
  float outside = 0;
  CHECK(qpu_relu(p, &outside, 1, 0) == -1);
  CHECK(test::contains(qpu_last_error(), "only pointers into live SharedArrays"));
}
