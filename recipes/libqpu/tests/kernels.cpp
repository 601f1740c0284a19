// The kernel library against plain C++: results, sizes around the block's, any
// number of QPUs, and nothing touched outside of the ranges given.
#include "qpu/kernels.h"

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

// An array in the middle of a larger one whose rest must not change. The array
// starts at an odd place of a 64-byte line.
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

// An array that ends exactly with its elements, so that reading on is an error.
SharedArray<float> tight(int n, float low = -4, float high = 4) {
  SharedArray<float> a(static_cast<std::size_t>(std::max(n, 1)));
  for (float& x : a) x = uniform(low, high);
  return a;
}

float qadd(float a, float b) { return floatOf(fadd(bitsOf(a), bitsOf(b))); }
float qmul(float a, float b) { return floatOf(fmul(bitsOf(a), bitsOf(b))); }

double ulpOf(double exact) {
  return std::max(std::ldexp(1.0, std::ilogb(static_cast<float>(std::fabs(exact))) - 23), 0x1p-149);
}

// Every size in kSizes with some number of QPUs; `call` computes into `out`.
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
      if (ulps == 0)
        REQUIRE(out[i] == static_cast<float>(e));
      else
        REQUIRE(std::fabs(static_cast<double>(out[i]) - e) <= ulps * ulpOf(e));
    }
  }
}

using F = k::Floats;
using A = const SharedArray<float>&;

}  // namespace

TEST_CASE("add, sub, mul, fma, axpy, scale round as the language does") {
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

TEST_CASE("relu and clamp") {
  elementwise([](F o, A a, A, A, int n, int q) { k::relu(o, a, n, q); },
              [](float a, float, float) { return a > 0 ? a : 0.0F; });
  elementwise([](F o, A a, A, A, int n, int q) { k::clamp(o, a, -1, 2.5F, n, q); },
              [](float a, float, float) { return std::min(std::max(a, -1.0F), 2.5F); });
}

TEST_CASE("exp, sqrt, sigmoid, tanh keep their bounds") {
  elementwise([](F o, A a, A, A, int n, int q) { k::exp(o, a, n, q); },
              [](float a, float, float) { return std::exp(static_cast<double>(a)); }, 4);
  elementwise([](F o, A a, A, A, int n, int q) { k::sqrt(o, a, n, q); },
              [](float a, float, float) { return a > 0 ? std::sqrt(static_cast<double>(a)) : 0; },
              4);
  elementwise([](F o, A a, A, A, int n, int q) { k::sigmoid(o, a, n, q); },
              [](float a, float, float) { return 1 / (1 + std::exp(-static_cast<double>(a))); },
              8);
  elementwise([](F o, A a, A, A, int n, int q) { k::tanh(o, a, n, q); },
              [](float a, float, float) { return std::tanh(static_cast<double>(a)); }, 8);
}

TEST_CASE("elementwise kernels work in place and on parts of arrays") {
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

TEST_CASE("sums do not depend on the number of QPUs and keep their bound") {
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

TEST_CASE("a long sum of positive numbers does not drift") {
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
      // Few values, so that there are equal ones.
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

TEST_CASE("sums of nothing are 0, there is no maximum of nothing") {
  CHECK(k::sum(nullptr, 0) == 0);
  CHECK(k::dot(nullptr, nullptr, 0) == 0);
  CHECK(k::norm(nullptr, 0) == 0);
  CHECK(test::contains(test::thrown<qpu::ArgumentError>([] { k::max(nullptr, 0); }),
                       "kernels::max: n is 0, must be at least 1"));
}

TEST_CASE("ranges outside of arrays are refused before anything runs") {
  SharedArray<float> a(64), b(64);
  const auto refused = [](auto f) { return test::thrown<qpu::ArgumentError>(f); };
  CHECK(test::contains(refused([&] { k::add(a, b, b, 65); }),
                       "kernels::add: out: 65 elements from "));
  CHECK(test::contains(refused([&] { k::add(a, b.pointer(1), b, 64); }), "a: 64 elements"));
  CHECK(test::contains(refused([&] { k::add(a, b, nullptr, 64); }), "b is null"));
  CHECK(test::contains(refused([&] { k::add(a, b, b, -1); }), "n is -1, must be at least 0"));
  CHECK(test::contains(refused([&] { k::relu(a, F::fromAddress(b.getAddress() + 2), 3); }),
                       "no multiple of 4"));
  CHECK(test::contains(refused([&] { k::sum(F::fromAddress(64), 1); }), "nearest is"));
  CHECK(test::contains(refused([&] { k::add(a, b, b, 64, 13); }), "12 QPUs"));
  CHECK_NOTHROW(k::add(nullptr, nullptr, nullptr, 0));
  CHECK_NOTHROW(k::add(a, b.getPointer(), &b, 64));
}
