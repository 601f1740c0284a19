#include "kernels/host.hpp"
#include "qpu/ieee.h"
#include "qpu/stream.h"

namespace qpu::kernels {
namespace {

// Computes out[i] = f(in[0][i], in[1][i], ..).
template <int Length, std::size_t N, typename F>
void map(const Int& n, const Ptr<Float>& out, const Pointers<N>& in, F f) {
  std::array<Float, Length> result;
  Int vpmRow = firstVpmRow<Length>();
  walk<N, Length>(
      n, in, me(), numQPUs(),
      [&](int j, Vectors<N>& x) { result[static_cast<std::size_t>(j)] = f(x); },
      [&](const IntExpr& first) { burst(result, out + first, vpmRow); },
      [&](Vectors<N>& x, const Int& first, const Int& count) {
        finishBursts();
        store(f(x), out + first, count);
      });
  finishBursts();
}

// Each function compiles kernels with a fixed number of inputs. f takes the inputs, followed by two
// scalars.
template <int Length, typename F>
auto compileOne(F f, const char* name) {
  return compile(
      [f](Int n, Ptr<Float> out, Ptr<Float> a, Float u, Float v) {
        map<Length, 1>(n, out, {a}, [&](Vectors<1>& x) { return f(x[0], u, v); });
      },
      name);
}
template <int Length, typename F>
auto compileTwo(F f, const char* name) {
  return compile(
      [f](Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b, Float u) {
        map<Length, 2>(n, out, {a, b}, [&](Vectors<2>& x) { return f(x[0], x[1], u); });
      },
      name);
}
template <int Length, typename F>
auto compileThree(F f, const char* name) {
  return compile(
      [f](Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b, Ptr<Float> c) {
        map<Length, 3>(n, out, {a, b, c}, [&](Vectors<3>& x) { return f(x[0], x[1], x[2]); });
      },
      name);
}

// Checks the arguments. Returns false if there is nothing to do.
bool check(const char* name, int n, Floats out, Floats a) {
  requireSize(name, "n", n);
  requireRange(name, "out", out, n);
  requireRange(name, "a", a, n);
  return n > 0;
}

// Each f has its own kernels, which are compiled when they are first used.
template <typename F>
void runOne(F f, const char* name, Floats out, Floats a, float u, float v, int n, int qpus) {
  if (!check(name, n, out, a)) return;
  if (mayBeLong(qpus)) {
    static const auto kernel = compileOne<kLong>(f, name);
    run(kernel, orLong(qpus), n, out, a, u, v);
  } else {
    static const auto kernel = compileOne<kShort>(f, name);
    run(kernel, qpus, n, out, a, u, v);
  }
}
template <typename F>
void runTwo(F f, const char* name, Floats out, Floats a, Floats b, float u, int n, int qpus) {
  const bool any = check(name, n, out, a);
  requireRange(name, "b", b, n);
  if (!any) return;
  if (mayBeLong(qpus)) {
    static const auto kernel = compileTwo<kLong>(f, name);
    run(kernel, orLong(qpus), n, out, a, b, u);
  } else {
    static const auto kernel = compileTwo<kShort>(f, name);
    run(kernel, qpus, n, out, a, b, u);
  }
}

}  // namespace

void add(Floats out, Floats a, Floats b, int n, int qpus) {
  runTwo([](Float& x, Float& y, Float&) { return x + y; }, "add", out, a, b, 0, n, qpus);
}
void sub(Floats out, Floats a, Floats b, int n, int qpus) {
  runTwo([](Float& x, Float& y, Float&) { return x - y; }, "sub", out, a, b, 0, n, qpus);
}
void mul(Floats out, Floats a, Floats b, int n, int qpus) {
  runTwo([](Float& x, Float& y, Float&) { return x * y; }, "mul", out, a, b, 0, n, qpus);
}
void axpy(Floats out, float factor, Floats a, Floats b, int n, int qpus) {
  runTwo([](Float& x, Float& y, Float& u) { return u * x + y; }, "axpy", out, a, b, factor, n,
         qpus);
}
void fma(Floats out, Floats a, Floats b, Floats c, int n, int qpus) {
  const auto f = [](Float& x, Float& y, Float& z) { return x * y + z; };
  const bool any = check("fma", n, out, a);
  requireRange("fma", "b", b, n);
  requireRange("fma", "c", c, n);
  if (!any) return;
  if (mayBeLong(qpus)) {
    static const auto kernel = compileThree<kLong>(f, "fma");
    run(kernel, orLong(qpus), n, out, a, b, c);
  } else {
    static const auto kernel = compileThree<kShort>(f, "fma");
    run(kernel, qpus, n, out, a, b, c);
  }
}
void scale(Floats out, float factor, Floats a, int n, int qpus) {
  runOne([](Float& x, Float& u, Float&) { return x * u; }, "scale", out, a, factor, 0, n, qpus);
}
void clamp(Floats out, Floats a, float low, float high, int n, int qpus) {
  runOne([](Float& x, Float& u, Float& v) { return ieee::min(ieee::max(x, u), v); }, "clamp", out, a, low,
         high, n, qpus);
}
void relu(Floats out, Floats a, int n, int qpus) {
  runOne([](Float& x, Float&, Float&) { return ieee::relu(x); }, "relu", out, a, 0, 0, n, qpus);
}
void exp(Floats out, Floats a, int n, int qpus) {
  runOne([](Float& x, Float&, Float&) { return ieee::exp(x); }, "exp", out, a, 0, 0, n, qpus);
}
void sqrt(Floats out, Floats a, int n, int qpus) {
  runOne([](Float& x, Float&, Float&) { return ieee::sqrt(x); }, "sqrt", out, a, 0, 0, n, qpus);
}
void sigmoid(Floats out, Floats a, int n, int qpus) {
  runOne([](Float& x, Float&, Float&) { return ieee::sigmoid(x); }, "sigmoid", out, a, 0, 0, n,
         qpus);
}
void tanh(Floats out, Floats a, int n, int qpus) {
  runOne([](Float& x, Float&, Float&) { return ieee::tanh(x); }, "tanh", out, a, 0, 0, n, qpus);
}

}  // namespace qpu::kernels
