// Reductions of an array to a number. The array is divided among twelve workers, regardless of the
// number of QPUs that execute the workers. The CPU combines the workers' results. The result is
// therefore the same for any number of QPUs.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/host.hpp"
#include "qpu/stream.h"

namespace qpu::kernels {
namespace {

constexpr std::size_t kWorkers = 12;
constexpr std::size_t kPartials = 16 * kWorkers;
constexpr int kLowest = std::numeric_limits<int>::min();

// Computes partial sums of f over N inputs. Each worker writes 16 sums, followed by their
// rounding errors.
template <std::size_t N, typename F>
void partialSums(const Int& n, const Ptr<Float>& out, const Pointers<N>& in, F f) {
  For (Int w = me(), w < static_cast<int>(kWorkers), w = w + numQPUs())
    std::array<Sum, 2> sums;
    walk<N, kShort>(
        n, in, w, static_cast<int>(kWorkers),
        [&](int j, Vectors<N>& x) { sums[static_cast<std::size_t>(j % 2)].add(f(x)); },
        [](const IntExpr&) {},
        [&](Vectors<N>& x, const Int&, const Int& count) {
          sums[0].add(select(index() < count, f(x), 0));
        });
    sums[0].add(sums[1].total);
    store(sums[0].total, out + (w << 4));
    store(sums[0].lost + sums[1].lost, out + ((w << 4) + static_cast<int>(kPartials)));
  End
}

template <typename K, typename... A>
double sumOfPartials(const K& kernel, int qpus, int n, A... in) {
  const Scratch partial(2 * kPartials);
  run(kernel, qpus, n, partial.floats(), in...);
  const float* p = partial.readFloats();
  double total = 0;
  for (std::size_t i = 0; i < kPartials; ++i) total += p[i];
  for (std::size_t i = kPartials; i < 2 * kPartials; ++i) total -= p[i];
  return total;
}

// Converts floats to integers. The conversion preserves the order. -0 and 0 become 0.
Int orderOf(const Float& x) {
  Int bits = asInt(x);
  Where (bits < 0)
    bits = kLowest - bits;
  End
  return bits;
}
int orderOfHost(int bits) { return bits < 0 ? kLowest - bits : bits; }

// Finds the 16 greatest elements for each worker. Writes these elements as ordered integers,
// followed by their indices.
void partialMaxima(Int n, Ptr<Int> out, Ptr<Float> a) {
  For (Int w = me(), w < static_cast<int>(kWorkers), w = w + numQPUs())
    Int best = kLowest;
    Int where = std::numeric_limits<int>::max();
    std::array<Int, kShort> order;
    const auto compare = [&](const Int& x, const IntExpr& number) {
      Where (x > best)
        best = x;
        where = number;
      End
    };
    walk<1, kShort>(
        n, {a}, w, static_cast<int>(kWorkers),
        [&](int j, Vectors<1>& x) { order[static_cast<std::size_t>(j)] = orderOf(x[0]); },
        [&](const IntExpr& first) {
          Int number = first + index();
          for (int j = 0; j < kShort; ++j)
            compare(order[static_cast<std::size_t>(j)], number + 16 * j);
        },
        [&](Vectors<1>& x, const Int& first, const Int& count) {
          // The elements of x beyond the end are copies of the last element, so they also have the
          // last element's index.
          Int o = orderOf(x[0]);
          compare(o, first + min(index(), count - 1));
        });
    store(best, out + (w << 4));
    store(where, out + ((w << 4) + static_cast<int>(kPartials)));
  End
}

struct Greatest {
  int order;
  int number;
};

Greatest greatest(const char* name, Floats a, int n, int qpus) {
  requireSize(name, "n", n, 1);
  requireRange(name, "a", a, n);
  static const auto kernel = compile(partialMaxima, "argmax");
  const Scratch partial(2 * kPartials);
  run(kernel, qpus, n, partial.ints(), a);
  const int* p = partial.hostInts();
  Greatest best{kLowest, std::numeric_limits<int>::max()};
  for (std::size_t i = 0; i < kPartials; ++i) {
    const Greatest g{p[i], p[i + kPartials]};
    if (g.order > best.order || (g.order == best.order && g.number < best.number)) best = g;
  }
  return best;
}

}  // namespace

float sum(Floats a, int n, int qpus) {
  requireSize("sum", "n", n);
  requireRange("sum", "a", a, n);
  static const auto kernel = compile(
      [](Int count, Ptr<Float> out, Ptr<Float> x) {
        partialSums<1>(count, out, {x}, [](Vectors<1>& v) { return v[0]; });
      },
      "sum");
  return n == 0 ? 0 : static_cast<float>(sumOfPartials(kernel, qpus, n, a));
}

float dot(Floats a, Floats b, int n, int qpus) {
  requireSize("dot", "n", n);
  requireRange("dot", "a", a, n);
  requireRange("dot", "b", b, n);
  static const auto kernel = compile(
      [](Int count, Ptr<Float> out, Ptr<Float> x, Ptr<Float> y) {
        partialSums<2>(count, out, {x, y}, [](Vectors<2>& v) { return v[0] * v[1]; });
      },
      "dot");
  return n == 0 ? 0 : static_cast<float>(sumOfPartials(kernel, qpus, n, a, b));
}

float norm(Floats a, int n, int qpus) {
  requireSize("norm", "n", n);
  requireRange("norm", "a", a, n);
  static const auto kernel = compile(
      [](Int count, Ptr<Float> out, Ptr<Float> x) {
        partialSums<1>(count, out, {x}, [](Vectors<1>& v) { return v[0] * v[0]; });
      },
      "norm");
  return n == 0 ? 0 : static_cast<float>(std::sqrt(sumOfPartials(kernel, qpus, n, a)));
}

float max(Floats a, int n, int qpus) {
  const int bits = orderOfHost(greatest("max", a, n, qpus).order);
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

int argmax(Floats a, int n, int qpus) { return greatest("argmax", a, n, qpus).number; }

}  // namespace qpu::kernels
