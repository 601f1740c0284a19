// Compares the functions in qpu/math.h and qpu/ieee.h with the double-precision functions of the C
// library. Errors are in units in the last place (ulp) of the float result.
#include "qpu/ieee.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/run.hpp"

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

double ulp(double exact) {
  const auto f = static_cast<float>(std::fabs(exact));
  return std::ldexp(1.0, std::max(std::ilogb(f), -126) - 23);  // ilogb(0) is INT_MIN
}

template <typename F>
std::vector<float> apply(const std::vector<float>& in, F f) {
  const std::size_t padded = (in.size() + 15) / 16 * 16;
  SharedArray<float> x(padded), y(padded);
  x.copyFrom(in.data(), in.size());
  compile([f](Int n, Ptr<Float> p, Ptr<Float> q) {
    For (Int i = 0, i < n, i += 16)
      Float v = p[i];
      q[i] = f(v);
    End
  })(static_cast<int>(padded), &x, &y);
  std::vector<float> out(in.size());
  y.copyTo(out.data(), out.size());
  return out;
}

// Returns the greatest difference between f and `exact` in ulp.
template <typename F, typename Exact>
double worst(const std::vector<float>& in, F f, Exact exact) {
  const std::vector<float> out = apply(in, f);
  double most = 0;
  for (std::size_t i = 0; i < in.size(); ++i) {
    const double e = exact(static_cast<double>(in[i]));
    most = std::max(most, std::fabs(static_cast<double>(out[i]) - e) / ulp(e));
  }
  return most;
}

std::vector<float> evenly(float from, float to, int count) {
  std::vector<float> v;
  for (int i = 0; i < count; ++i)
    v.push_back(from + (to - from) * static_cast<float>(i) / static_cast<float>(count - 1));
  return v;
}

// Returns numbers of every magnitude with both signs.
std::vector<float> everywhere() {
  std::vector<float> v;
  for (int e = -120; e <= 120; e += 3)
    for (const float m : {1.0F, 1.25F, 1.3333334F, 1.7F, 1.9999999F})
      for (const float sign : {1.0F, -1.0F}) v.push_back(sign * std::ldexp(m, e));
  return v;
}

std::vector<float> positive(std::vector<float> v) {
  for (float& x : v) x = std::fabs(x);
  return v;
}

}  // namespace

TEST_CASE("reciprocal and div are within their bounds") {
  CHECK(worst(everywhere(), [](Float& x) { return reciprocal(x); },
              [](double x) { return 1 / x; }) <= 3);
  CHECK(worst(everywhere(), [](Float& x) { return div(3.1F, x); },
              [](double x) { return static_cast<double>(3.1F) / x; }) <= 4);
  CHECK(apply({0.0F, kInf, -kInf}, [](Float& x) { return reciprocal(x); }) ==
        std::vector<float>{kInf, 0, 0});
}

TEST_CASE("divisions by large numbers are within their bound") {
  std::vector<float> large;
  for (int e = 123; e <= 127; ++e)
    for (const float m : {1.0F, 1.000001F, 1.3333334F, 1.9999999F})
      for (const float sign : {1.0F, -1.0F}) large.push_back(sign * std::ldexp(m, e));
  for (const float a : {3e38F, 1e10F, -7.0F})
    CHECK(worst(large, [a](Float& x) { return qpu::ieee::div(a, x); },
                [a](double x) { return static_cast<double>(a) / x; }) <= 4);
  CHECK(apply({kInf, -kInf}, [](Float& x) { return qpu::ieee::div(3e38F, x); }) ==
        std::vector<float>{0, 0});
}

TEST_CASE("sqrt and its reciprocal are within their bounds") {
  CHECK(worst(positive(everywhere()), [](Float& x) { return reciprocalSqrt(x); },
              [](double x) { return 1 / std::sqrt(x); }) <= 4);
  CHECK(worst(positive(everywhere()), [](Float& x) { return sqrt(x); },
              [](double x) { return std::sqrt(x); }) <= 4);
  const std::vector<float> ends = {0x1p-126F, 0x1.8p-126F, 0x1.fffffep-126F, 0x1p-125F,
                                   0x1.fffffep127F};
  CHECK(worst(ends, [](Float& x) { return reciprocalSqrt(x); },
              [](double x) { return 1 / std::sqrt(x); }) <= 4);
  CHECK(worst(ends, [](Float& x) { return sqrt(x); }, [](double x) { return std::sqrt(x); }) <= 4);
  CHECK(apply({0.0F, -4.0F, 1e-40F}, [](Float& x) { return sqrt(x); }) ==
        std::vector<float>{0, 0, 0});
}

TEST_CASE("exp is within its bounds") {
  CHECK(worst(evenly(-86.9F, 88.7F, 20000), [](Float& x) { return exp(x); },
              [](double x) { return std::exp(x); }) <= 4);
  CHECK(apply({0.0F, 88.8F, 1000.0F, kInf, -88.0F, -1000.0F, -kInf},
              [](Float& x) { return exp(x); }) ==
        std::vector<float>{1, kInf, kInf, kInf, 0, 0, 0});
}

TEST_CASE("log is within its bounds") {
  CHECK(worst(positive(everywhere()), [](Float& x) { return log(x); },
              [](double x) { return std::log(x); }) <= 4);
  const std::vector<float> near = evenly(0.5F, 2.0F, 4000);
  const std::vector<float> out = apply(near, [](Float& x) { return log(x); });
  for (std::size_t i = 0; i < near.size(); ++i)
    CHECK(std::fabs(out[i] - std::log(near[i])) < 2e-7F);
  CHECK(apply({0.0F, -1.0F, 1.0F}, [](Float& x) { return log(x); }) ==
        std::vector<float>{-kInf, -kInf, 0});
}

TEST_CASE("sigmoid and tanh are within their bounds") {
  CHECK(worst(evenly(-86.0F, 80.0F, 20000), [](Float& x) { return sigmoid(x); },
              [](double x) { return 1 / (1 + std::exp(-x)); }) <= 8);
  CHECK(worst(evenly(-10.0F, 10.0F, 20001), [](Float& x) { return tanh(x); },
              [](double x) { return std::tanh(x); }) <= 8);
  CHECK(worst(evenly(-1e-3F, 1e-3F, 1000), [](Float& x) { return tanh(x); },
              [](double x) { return std::tanh(x); }) <= 8);
  // Also check the limits, where the special function unit is not exact.
  const auto ends = apply({-kInf, kInf, 0.0F}, [](Float& x) { return sigmoid(x); });
  CHECK(ends[0] == 0);
  CHECK(std::fabs(ends[1] - 1.0F) <= 3 * ulp(0.5));
  CHECK(std::fabs(ends[2] - 0.5F) <= 3 * ulp(0.25));
  CHECK(apply({-kInf, kInf, 0.0F}, [](Float& x) { return tanh(x); }) ==
        std::vector<float>{-1, 1, 0});
}

TEST_CASE("select works per element, also inside Where") {
  CHECK(test::ints([](Int& x) { return select(x < 5, x, 100 - x); })[5] == 95);
  CHECK(apply({1.0F, -2.0F}, [](Float& x) {
          Float r = 0;
          Where (x > 0)
            r = select(x > 0.5F, x * 2, -x);
          End
          return r;
        }) == std::vector<float>{2, 0});
}

TEST_CASE("reductions over a vector are in all elements") {
  test::Ints all{};
  all.fill(120);
  CHECK(test::ints([](Int& x) { return sumOf(x); }) == all);
  CHECK(test::ints([](Int& x) { return toInt(sumOf(toFloat(x))); }) == all);
  all.fill(17);
  CHECK(test::ints([](Int& x) { return maxOf((x ^ 5) + 2); }) == all);
  CHECK(test::ints([](Int& x) { return toInt(maxOf(toFloat(x) + 2)); }) == all);
  all.fill(2);
  CHECK(test::ints([](Int& x) { return minOf((x ^ 5) + 2); }) == all);
  CHECK(test::ints([](Int& x) { return toInt(minOf(toFloat(x) + 2)); }) == all);
}
