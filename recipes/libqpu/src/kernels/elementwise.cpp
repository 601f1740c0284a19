#include "kernels/host.hpp"
#include "kernels/stream.hpp"

namespace qpu::kernels {
namespace {

// out[i] = f(in[0][i], in[1][i], ..).
template <std::size_t N, typename F>
void map(const Int& n, const Ptr<Float>& out, const Pointers<N>& in, F f) {
  std::array<Float, kVectors> result;
  walk<N>(
      n, in, me(), numQPUs(), [&](int j, Vectors<N>& x) { result[static_cast<std::size_t>(j)] = f(x); },
      [&](const Int& b) { burst(result, out + (b << 6)); },
      [&](Vectors<N>& x, const Int& first, const Int& count) {
        finishBursts();
        store(f(x), out + first, count);
      });
  finishBursts();
}

// The kernels by number of inputs and of scalar factors; f takes all in order.
template <typename F>
auto one(F f, const char* name) {
  return compile(
      [f](Int n, Ptr<Float> out, Ptr<Float> a) {
        map<1>(n, out, {a}, [&](Vectors<1>& x) { return f(x[0]); });
      },
      name);
}
template <typename F>
auto oneScaled(F f, const char* name) {
  return compile(
      [f](Int n, Ptr<Float> out, Ptr<Float> a, Float u, Float v) {
        map<1>(n, out, {a}, [&](Vectors<1>& x) { return f(x[0], u, v); });
      },
      name);
}
template <typename F>
auto two(F f, const char* name) {
  return compile(
      [f](Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b, Float u) {
        map<2>(n, out, {a, b}, [&](Vectors<2>& x) { return f(x[0], x[1], u); });
      },
      name);
}
template <typename F>
auto three(F f, const char* name) {
  return compile(
      [f](Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b, Ptr<Float> c) {
        map<3>(n, out, {a, b, c}, [&](Vectors<3>& x) { return f(x[0], x[1], x[2]); });
      },
      name);
}

// False when there is nothing to do.
bool check(const char* name, int n, Floats out, Floats a) {
  requireSize(name, "n", n);
  requireRange(name, "out", out, n);
  requireRange(name, "a", a, n);
  return n > 0;
}

template <typename K>
void runOne(const K& kernel, Floats out, Floats a, int n, int qpus) {
  if (check(kernel.name(), n, out, a)) run(kernel, qpus, n, out, a);
}
template <typename K>
void runScaled(const K& kernel, Floats out, Floats a, float u, float v, int n, int qpus) {
  if (check(kernel.name(), n, out, a)) run(kernel, qpus, n, out, a, u, v);
}
template <typename K>
void runTwo(const K& kernel, Floats out, Floats a, Floats b, float u, int n, int qpus) {
  const bool any = check(kernel.name(), n, out, a);
  requireRange(kernel.name(), "b", b, n);
  if (any) run(kernel, qpus, n, out, a, b, u);
}

}  // namespace

void add(Floats out, Floats a, Floats b, int n, int qpus) {
  static const auto kernel = two([](Float& x, Float& y, Float&) { return x + y; }, "add");
  runTwo(kernel, out, a, b, 0, n, qpus);
}
void sub(Floats out, Floats a, Floats b, int n, int qpus) {
  static const auto kernel = two([](Float& x, Float& y, Float&) { return x - y; }, "sub");
  runTwo(kernel, out, a, b, 0, n, qpus);
}
void mul(Floats out, Floats a, Floats b, int n, int qpus) {
  static const auto kernel = two([](Float& x, Float& y, Float&) { return x * y; }, "mul");
  runTwo(kernel, out, a, b, 0, n, qpus);
}
void axpy(Floats out, float factor, Floats a, Floats b, int n, int qpus) {
  static const auto kernel = two([](Float& x, Float& y, Float& u) { return u * x + y; }, "axpy");
  runTwo(kernel, out, a, b, factor, n, qpus);
}
void fma(Floats out, Floats a, Floats b, Floats c, int n, int qpus) {
  static const auto kernel = three([](Float& x, Float& y, Float& z) { return x * y + z; }, "fma");
  const bool any = check("fma", n, out, a);
  requireRange("fma", "b", b, n);
  requireRange("fma", "c", c, n);
  if (any) run(kernel, qpus, n, out, a, b, c);
}
void scale(Floats out, float factor, Floats a, int n, int qpus) {
  static const auto kernel = oneScaled([](Float& x, Float& u, Float&) { return x * u; }, "scale");
  runScaled(kernel, out, a, factor, 0, n, qpus);
}
void clamp(Floats out, Floats a, float low, float high, int n, int qpus) {
  static const auto kernel =
      oneScaled([](Float& x, Float& u, Float& v) { return min(max(x, u), v); }, "clamp");
  runScaled(kernel, out, a, low, high, n, qpus);
}
void relu(Floats out, Floats a, int n, int qpus) {
  static const auto kernel = one([](Float& x) { return qpu::max(x, 0); }, "relu");
  runOne(kernel, out, a, n, qpus);
}
void exp(Floats out, Floats a, int n, int qpus) {
  static const auto kernel = one([](Float& x) { return qpu::exp(x); }, "exp");
  runOne(kernel, out, a, n, qpus);
}
void sqrt(Floats out, Floats a, int n, int qpus) {
  static const auto kernel = one([](Float& x) { return qpu::sqrt(x); }, "sqrt");
  runOne(kernel, out, a, n, qpus);
}
void sigmoid(Floats out, Floats a, int n, int qpus) {
  static const auto kernel = one([](Float& x) { return qpu::sigmoid(x); }, "sigmoid");
  runOne(kernel, out, a, n, qpus);
}
void tanh(Floats out, Floats a, int n, int qpus) {
  static const auto kernel = one([](Float& x) { return qpu::tanh(x); }, "tanh");
  runOne(kernel, out, a, n, qpus);
}

}  // namespace qpu::kernels
