// Kernels for which compiled code must produce the same bits as the interpreter.
#ifndef TESTS_COMPILER_CASES_HPP
#define TESTS_COMPILER_CASES_HPP

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "compiler/compile.hpp"
#include "interp/machine.hpp"
#include "tests/trace.hpp"
// This header must be included after trace.hpp, which must be the first header that defines the
// language's macros.
#include "tests/random_program.hpp"
#include "tutorial/gcd.hpp"
#include "tutorial/heatmap.hpp"
#include "tutorial/mandelbrot.hpp"
#include "tutorial/memory.hpp"
#include "tutorial/oet.hpp"
#include "tutorial/rot3d.hpp"
#include "tutorial/tri.hpp"

// Compiles the kernel and runs it with these uniforms as its parameters.
void execute(const qpu::detail::Source& source, const qpu::compiler::Options& options, int qpus,
             const std::vector<std::uint32_t>& arguments);

namespace cases {

inline std::uint32_t word(int x) { return static_cast<std::uint32_t>(x); }
inline std::uint32_t word(float x) { return qpu::detail::Argument<qpu::Float>::uniform(x); }
template <typename T>
std::uint32_t word(SharedArray<T>* a) {
  return a->getAddress();
}

using Words = std::vector<std::uint32_t>;

template <typename T>
Words wordsOf(const SharedArray<T>& a) {
  Words words(a.size());
  std::memcpy(words.data(), a.data(), 4 * words.size());
  return words;
}

// Runs f on the interpreter, then compiles f at every level and runs it on the emulator. Checks
// that `array` has the same contents after each run. Every run starts with the same contents.
template <typename T, typename F, typename... A>
void sameOn(std::initializer_list<int> counts, SharedArray<T>& array, F f, A... arguments) {
  const Words start = wordsOf(array);
  const auto reset = [&] { std::memcpy(array.data(), start.data(), 4 * start.size()); };
  const qpu::detail::Source source = test::trace(f, "case");
  qpu::detail::checkGathers(source);
  const qpu::interp::Code code = qpu::interp::lower(source);
  const Words uniforms = {word(arguments)...};
  for (const int qpus : counts) {
    CAPTURE(qpus);
    reset();
    qpu::interp::run(code, qpus, uniforms.data(), uniforms.size());
    const Words expected = wordsOf(array);
    for (int level = 0; level <= 2; ++level) {
      CAPTURE(level);
      reset();
      qpu::compiler::Options options;
      options.level = level;
      execute(source, options, qpus, uniforms);
      CHECK(wordsOf(array) == expected);
    }
  }
  reset();
}

template <typename T, typename F, typename... A>
void same(SharedArray<T>& array, F f, A... arguments) {
  sameOn({1, 2, 3, 5, 12}, array, f, arguments...);
}

// Checks a kernel that writes the same words on all QPUs, and therefore must run on one QPU.
template <typename T, typename F, typename... A>
void sameOnOne(SharedArray<T>& array, F f, A... arguments) {
  sameOn({1}, array, f, arguments...);
}

inline SharedArray<int> ints(int n, int factor = 37, int modulus = 101) {
  SharedArray<int> a(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) a[i] = i * factor % modulus - modulus / 3;
  return a;
}

// Returns bit patterns of arithmetic edge cases, followed by those of ordinary numbers.
inline SharedArray<int> patterns(int n, std::uint32_t seed) {
  static constexpr std::array<std::uint32_t, 24> kEdges = {
      0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x3f800000,
      0xbf800000, 0x3f800001, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000,
      0xffffffff, 0x7fffffff, 0x4f000000, 0xcf000000, 0x4effffff, 0x00ffffff, 0x01000000,
      0x0000001f, 0x00000020, 0xfffffff0};
  SharedArray<int> a(static_cast<std::size_t>(n));
  std::uint32_t x = seed;
  for (int i = 0; i < n; ++i) {
    x = x * 1664525U + 1013904223U;
    std::uint32_t bits = (x >> 28U) < 9 ? kEdges[(x >> 8U) % kEdges.size()] : x ^ x >> 13U;
    std::memcpy(a.data() + i, &bits, 4);
  }
  return a;
}

// Computes out[16 * i ..] = f(x, y) for 16 pairs of vectors of patterns.
template <typename F>
void binary(F f) {
  const SharedArray<int> x = patterns(256, 1), y = patterns(256, 2);
  SharedArray<int> out(256);
  sameOnOne(
      out,
      [f](Ptr<Int> a, Ptr<Int> b, Ptr<Int> r) {
        For (Int i = 0, i < 256, i = i + 16)
          gather(a + i + index());
          gather(b + i + index());
          Int u, v;
          receive(u);
          receive(v);
          store(f(u, v), r + i);
        End
      },
      const_cast<SharedArray<int>*>(&x), const_cast<SharedArray<int>*>(&y), &out);
}
template <typename F>
void binaryFloat(F f) {
  binary([f](Int& u, Int& v) {
    return qpu::asInt(f(qpu::asFloat(u), qpu::asFloat(v)));
  });
}

}  // namespace cases

// --- the tutorial ---

TEST_CASE("tutorial: Hello") {
  SharedArray<int> a(12 * 16);
  cases::same(a, tutorial::hello, &a);
}

TEST_CASE("tutorial: ReqRecv") {
  SharedArray<int> a = cases::ints(64);
  cases::sameOnOne(a, tutorial::reqRecv, &a);
}

TEST_CASE("tutorial: GCD") {
  SharedArray<int> a(16), b(16), r(16);
  for (int i = 0; i < 16; ++i) {
    a[i] = 100 + 7 * i % 31;
    b[i] = 100 + 11 * i % 37;
  }
  cases::sameOnOne(r, tutorial::gcd, &a, &b, &r);
  cases::sameOnOne(r, tutorial::gcdUnrolled, &a, &b, &r);
}

TEST_CASE("tutorial: Tri") {
  SharedArray<int> a(12 * 16);
  for (int i = 0; i < 12 * 16; ++i) a[i] = i;
  cases::same(a, tutorial::multiTri, &a);
  cases::sameOnOne(a, tutorial::tri, &a);
  SharedArray<float> f(16);
  for (int i = 0; i < 16; ++i) f[i] = static_cast<float>(i) + 0.75F;
  cases::sameOnOne(f, tutorial::triFloat, &f);
}

TEST_CASE("tutorial: DMATri") {
  SharedArray<int> a(256);
  for (int i = 0; i < 256; ++i) a[i] = i;
  cases::sameOnOne(a, tutorial::dmaTri, &a);
}

TEST_CASE("tutorial: OET") {
  SharedArray<int> a = cases::ints(32, 37, 23);
  cases::sameOnOne(a, tutorial::oddEvenSort, &a);
}

TEST_CASE("tutorial: Rot3D") {
  const int n = 16 * 41;
  SharedArray<float> x(n + 13 * 16), y(n + 13 * 16);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i);
    y[i] = 500.0F - 2.0F * static_cast<float>(i);
  }
  // y must also have the same contents at the start of each run, so x and y are in the same array.
  SharedArray<float> both(2 * x.size());
  std::copy(x.begin(), x.end(), both.begin());
  std::copy(y.begin(), y.end(), both.begin() + static_cast<std::ptrdiff_t>(x.size()));
  const int distance = static_cast<int>(x.size());
  const auto on = [distance](auto kernel) {
    return [distance, kernel](Int count, Float c, Float s, Ptr<Float> p) {
      kernel(count, c, s, p, p + distance);
    };
  };
  const float c = std::cos(0.3F);
  const float s = std::sin(0.3F);
  cases::sameOnOne(both, on(tutorial::rot3D1), n, c, s, &both);
  cases::sameOnOne(both, on(tutorial::rot3D2), n, c, s, &both);
  cases::sameOn({1, 2, 7, 12}, both, on(tutorial::rot3D3), n, c, s, &both);
}

TEST_CASE("tutorial: HeatMap") {
  const int width = 32, height = 13, pitch = 16 + width + 32;
  SharedArray<float> map((height + 2) * pitch), out((height + 2) * pitch);
  for (std::size_t i = 0; i < map.size(); ++i) map[i] = static_cast<float>(i * 7919 % 256);
  cases::same(out, tutorial::heatStep, &map, &out, pitch, width, height);
}

TEST_CASE("tutorial: Mandelbrot") {
  SharedArray<int> out(32 * 20);
  cases::same(out, tutorial::mandelbrot, -2.0F, -1.25F, 0.09F, 32, 20, 40, &out);
}

// --- arithmetic ---

TEST_CASE("integer operations match the interpreter") {
  using qpu::max;
  using qpu::min;
  cases::binary([](Int& a, Int& b) { return a + b; });
  cases::binary([](Int& a, Int& b) { return a - b; });
  cases::binary([](Int& a, Int& b) { return a * b; });
  cases::binary([](Int& a, Int& b) { return min(a, b) ^ max(b, a); });
  cases::binary([](Int& a, Int& b) { return (a << b) + (a >> b) + shr(a, b) + ror(a, b); });
  cases::binary([](Int& a, Int& b) { return (a & b) ^ (a | ~b); });
  cases::binary([](Int& a, Int& b) { return -a + b * 5 + (a ^ 77777); });
}

TEST_CASE("integer operations with constants match") {
  cases::binary([](Int& a, Int&) { return a + 16; });
  cases::binary([](Int& a, Int&) { return a - 16; });
  cases::binary([](Int& a, Int&) { return 16 - a; });
  cases::binary([](Int& a, Int&) { return (a << 16) + (a >> 31) + shr(a, 17) + ror(a, 20); });
  cases::binary([](Int& a, Int&) { return (a << 33) + (a >> 0) + (3 << a) + (a << 3 << 4); });
  cases::binary([](Int& a, Int&) { return a * 256 + a * 3 + a * 4096 + a * (1 << 24) + 7 * a; });
  cases::binary([](Int& a, Int&) { return (a & 0) + (a | 0) + (a & -1) + (a ^ 0) + (a + 5 + 6); });
  cases::binary([](Int& a, Int&) { return (a - a) + (a ^ a) + (a | a) + ~~a; });
  cases::binary([](Int&, Int&) { return qpu::IntExpr(3) * 5 + (qpu::IntExpr(-7) >> 1); });
}

TEST_CASE("float operations match the interpreter") {
  cases::binaryFloat([](const FloatExpr& a, const FloatExpr& b) { return a + b; });
  cases::binaryFloat([](const FloatExpr& a, const FloatExpr& b) { return a - b; });
  cases::binaryFloat([](const FloatExpr& a, const FloatExpr& b) { return a * b; });
  cases::binaryFloat([](const FloatExpr& a, const FloatExpr& b) { return min(a, b); });
  cases::binaryFloat([](const FloatExpr& a, const FloatExpr& b) { return max(a, b); });
  cases::binaryFloat([](const FloatExpr& a, const FloatExpr& b) { return -a + toFloat(toInt(b)); });
  cases::binaryFloat([](const FloatExpr& a, const FloatExpr& b) { return abs(a) * 0.5F + b * 3.0F; });
  cases::binaryFloat([](const FloatExpr& a, const FloatExpr&) { return a * 0.0F + a * 1.0F + (a + 0.0F); });
  cases::binary([](Int& a, Int& b) { return toInt(toFloat(a) * 0.25F) + toInt(qpu::asFloat(b)); });
}

TEST_CASE("special functions match the interpreter") {
  cases::binaryFloat([](const FloatExpr& a, const FloatExpr&) { return recip(a) + rsqrt(a); });
  cases::binaryFloat([](const FloatExpr& a, const FloatExpr&) { return exp2(a) + log2(a); });
}

TEST_CASE("rotations and broadcasts match the interpreter") {
  cases::binary([](Int& a, Int& b) { return rotate(a, 1) + rotate(b, 15) + rotate(a + b, 16); });
  cases::binary([](Int& a, Int& b) { return rotate(a, b) + rotate(rotate(a, 9), 9); });
  cases::binary([](Int& a, Int& b) { return broadcast(a, 0) + broadcast(b, 15) + broadcast(a, 7); });
  cases::binary([](Int& a, Int&) { return rotate(a, me() + 3) + rotate(index(), 5) + rotate(me(), 3); });
}

TEST_CASE("comparisons match the interpreter") {
  const auto count = [](auto condition) {
    cases::binary([condition](Int& a, Int& b) {
      Int r = 1;
      Where (condition(a, b))
        r = 2;
      Else
        r = r + 4;
      End
      If (any(condition(a, b)))
        r = r + 8;
      End
      If (all(condition(a, b)))
        r = r + 16;
      End
      If (!(any(condition(a, b))))
        r = r + 32;
      End
      return r;
    });
  };
  count([](Int& a, Int& b) { return a == b; });
  count([](Int& a, Int& b) { return a != b; });
  count([](Int& a, Int& b) { return a < b; });
  count([](Int& a, Int& b) { return a <= b; });
  count([](Int& a, Int& b) { return a > b; });
  count([](Int& a, Int& b) { return a >= b; });
  count([](Int& a, Int&) { return a > 0; });
  count([](Int& a, Int&) { return a < 16; });
  count([](Int& a, Int&) { return 1000 > a; });
  const auto x = [](Int& a) { return qpu::asFloat(a); };
  count([x](Int& a, Int& b) { return x(a) == x(b); });
  count([x](Int& a, Int& b) { return x(a) != x(b); });
  count([x](Int& a, Int& b) { return x(a) < x(b); });
  count([x](Int& a, Int& b) { return x(a) <= x(b); });
  count([x](Int& a, Int& b) { return x(a) > x(b); });
  count([x](Int& a, Int& b) { return x(a) >= x(b); });
  count([x](Int& a, Int&) { return x(a) > 1.5F; });
}

TEST_CASE("all pairs of comparisons combine with and, or, not") {
  // Comparisons are selected by number, so that a single loop can test every pair.
  const auto leaf = [](int kind, Int& a, Int& b) {
    const FloatExpr u = qpu::asFloat(a);
    const FloatExpr v = qpu::asFloat(b);
    switch (kind) {
      case 0: return a == b;
      case 1: return a != b;
      case 2: return a < b;
      case 3: return a >= b;
      case 4: return u == v;
      case 5: return u != v;
      case 6: return u < v;
      default: return u >= v;
    }
  };
  const SharedArray<int> x = cases::patterns(64, 5);
  SharedArray<int> out(16 * 8 * 8);
  SharedArray<int>* in = const_cast<SharedArray<int>*>(&x);
  for (int first = 0; first < 8; ++first)
    cases::sameOnOne(
        out,
        [=](Ptr<Int> p, Ptr<Int> r) {
          Int a = p[0], b = p[16], c = p[32], d = p[48];
          for (int second = 0; second < 8; ++second) {
            Int both = 0;
            Where (leaf(first, a, b) && leaf(second, c, d))
              both = 1;
            Else
              both = 2;
            End
            Where (leaf(first, a, b) || leaf(second, c, d))
              both = both + 4;
            End
            Where (!(leaf(first, a, c) && leaf(second, b, d)) || (leaf(second, a, d) && a < c))
              both = both + 8;
              Where (leaf(second, b, c))
                both = both + 16;
                a = a + 1;
              Else
                both = both + 32;
              End
              b = b ^ both;
            End
            r[16 * second] = both + a + b;
          }
        },
        in, &out);
}

// --- control flow ---

TEST_CASE("scalar conditions of every shape match") {
  SharedArray<int> x = cases::ints(64), out(16 * 12);
  cases::sameOnOne(
      out,
      [](Ptr<Int> p, Ptr<Int> r) {
        Int a = p[0], b = p[16], c = p[32], d = p[48];
        Int n = 0;
        const auto mark = [&](int bit, const Cond& condition) {
          If (condition)
            n = n + (1 << bit);
          Else
            n = n ^ (1 << (bit + 10));
          End
        };
        mark(0, any(a > b) && any(c > d));
        mark(1, any(a > 60) || all(c < 100));
        mark(2, !(any(a > 60) || all(c < 10)) && any(b == b));
        mark(3, (any(a > 60) && all(c < 10)) || (all(b > -100) && !any(d == 1000)));
        mark(4, all(a > -1000) && (all(b > 0) || any(c < 0) || any(d == 3)));
        mark(5, any(a == 4) && any(a == 5) && any(a == 6));
        mark(6, Cond(a > b));
        mark(7, any(qpu::IntExpr(1) > 0));
        mark(8, any(qpu::IntExpr(1) < 0) || any(a > b));
        *r = n;
        Int i = 0;
        While (any(i < 5) && any(n != 3))
          i = i + 1;
          n = n + i;
        End
        r[16] = n;
        While (any(i < 9) || any(i == 100))
          i = i + 1;
          n = n * 3 + i;
        End
        r[32] = n + i;
      },
      &x, &out);
}

TEST_CASE("nested, skipped and variable-declaring loops match") {
  SharedArray<int> out(16 * 16 * 12);
  cases::same(
      out,
      [](Int n, Ptr<Int> r) {
        r = r + (me() << 8);
        Int total = index();
        For (Int i = 0, i < n, i = i + 1)
          Int t = i;
          For (Int j = i, j < n, j = j + 2)
            Int fresh;
            fresh = fresh + t;
            t = t + j;
            total = total + fresh;
          End
          r[0] = t;
          r = r + 16;
        End
        For (Int i = 5, i < 5, i = i + 1)
          total = 0;
        End
        For (Int i = 0, i < n - 7, i = i + 1)
          total = 0;
        End
        Int swap = 1, other = 2;
        While (any(swap < 100))
          Int t = swap + other;
          swap = other;
          other = t;
        End
        *r = total + swap * other;
      },
      7, &out);
}

TEST_CASE("values that cross basic blocks match") {
  SharedArray<int> out(16 * 4);
  cases::sameOnOne(
      out,
      [](Int n, Ptr<Int> r) {
        Int a = index(), b = 100, c = a, d = 7;
        For (Int i = 0, i < n, i = i + 1)
          Int t = a;
          a = b;
          b = t;
          If (any(i == 3))
            c = a;
            d = b;
          Else
            c = c + 1;
          End
          Where (a > b)
            d = c;
          End
        End
        r[0] = a;
        r[16] = b;
        r[32] = c;
        r[48] = d;
      },
      9, &out);
}

TEST_CASE("branches and Where can be nested in each other") {
  SharedArray<int> x = cases::ints(32), out(32);
  cases::sameOnOne(
      out,
      [](Ptr<Int> p, Ptr<Int> r) {
        Int a = p[0], b = p[16];
        Where (a > 0)
          If (any(b > 20))
            a = a + b;
            Where (b < 0)
              b = 5;
            End
          Else
            a = 0;
          End
          b = b + 1;
        Else
          b = b - 1;
        End
        r[0] = a;
        r[16] = b;
      },
      &x, &out);
}

// --- memory ---

TEST_CASE("loads from all kinds of pointers match") {
  SharedArray<int> x = cases::ints(256), out(16 * 8 * 12);
  cases::same(
      out,
      [](Ptr<Int> p, Ptr<Int> r) {
        Int u = p[3];
        Int v = *(p + index() + 5);
        Int w = *(p + index() * 3 + 7);
        Int far = p[rotate(index(), 1)];
        Ptr<Int> q = p;
        Where (index() == 0)
          q = q + 40;
        End
        Int mixed = *q;
        r = r + (me() << 7);
        r[0] = u + v * 3;
        r[16] = w ^ mixed;
        *(r + 32 + index()) = far;
        store(v - u, r + 48 + index() * 2);
      },
      &x, &out);
}

TEST_CASE("loads return the words of preceding stores") {
  SharedArray<int> a = cases::ints(16 * 12);
  cases::same(
      a,
      [](Ptr<Int> p) {
        p = p + (me() << 4);
        Int x = *p;
        *p = x + 1;
        Int y = *p;
        store(y * 2, p);
        Int z = *p;
        For (Int i = 0, i < 4, i = i + 1)
          *p = z + *p;
        End
        *p = *p + x;
      },
      &a);
}

TEST_CASE("stores in quick succession match") {
  SharedArray<int> out(16 * 10 * 12);
  cases::same(
      out,
      [](Ptr<Int> r) {
        r = r + me() * 160;
        for (int i = 0; i < 4; ++i) store(index() + i, r + 16 * i);
        If (any((me() & 1) == 1))
          store(index() * 3, r + 64);
          store(index() * 5, r + 80);
          store(index() * 7, r + 96);
        Else
          r[64] = 9;
        End
        store(me() + index(), r + 112);
        r[128] = 1;
        store(2, r + 144);
      },
      &out);
}

TEST_CASE("stores of partial vectors match") {
  SharedArray<int> out(16 * 40);
  cases::sameOnOne(
      out,
      [](Ptr<Int> r) {
        For (Int i = 1, i < 17, i = i + 1)
          store(index() + 100 * i, r + (i << 4), i);
        End
        for (int i = 1; i < 17; ++i) store(index() - i, r + 16 * (17 + i), i);
        store(5, r, 3);
        store(6, r + 8);
      },
      &out);
}

TEST_CASE("gathers in flight in varying numbers match") {
  SharedArray<int> x = cases::ints(512), out(16 * 12);
  cases::same(
      out,
      [](Ptr<Int> p, Ptr<Int> r) {
        Ptr<Int> q = p + index();
        std::array<Int, 8> v;
        for (int i = 0; i < 8; ++i) gather(q + 16 * i);
        Int sum = 0;
        For (Int i = 0, i < 6, i = i + 1)
          for (int j = 0; j < 2; ++j) {
            receive(v[0]);
            sum = sum * 3 + v[0];
            gather(q + (i << 5) + 16 * j);
          }
        End
        for (Int& w : v) {
          receive(w);
          sum = sum * 5 + w;
        }
        r[me() << 4] = sum;
      },
      &x, &out);
  cases::same(
      out,
      [](Ptr<Int> p, Ptr<Int> r) {
        Ptr<Int> q = p + index();
        Int a, b, c, sum = 0;
        gather(q);
        gather(q + 16);
        gather(q + 32);
        For (Int i = 0, i < 7, i = i + 1)
          receive(a);
          gather(q + (i << 4));
          receive(b);
          gather(q + (i << 5));
          receive(c);
          gather(q + i * 3);
          sum = sum * 2 + a - b + c;
        End
        r[me() << 4] = sum;  // the vectors that are still outstanding are not used
      },
      &x, &out);
  cases::same(
      out,
      [](Int asked, Int taken, Ptr<Int> p, Ptr<Int> r) {
        For (Int i = 0, i < asked, i = i + 1)
          gather(p + (i << 4) + index());
        End
        Int v, sum = 0;
        For (Int i = 0, i < taken, i = i + 1)
          receive(v);
          sum = sum + v;
        End
        Where (index() > 3)
          sum = 0;
        End
        r[me() << 4] = sum;
      },
      4, 2, &x, &out);
}

TEST_CASE("loads match while gathers are outstanding") {
  SharedArray<int> x = cases::ints(256), out(16 * 12);
  cases::same(
      out,
      [](Ptr<Int> p, Ptr<Int> r) {
        Ptr<Int> q = p + index();
        Int a, b;
        gather(q);
        gather(q + 16);
        gather(q + 48);
        Int c = p[64] + p[80];
        receive(a);
        Int d = p[96];
        receive(b);
        Where (a > b)
          receive(a);
        End
        r[me() << 4] = a - b + c * d;
      },
      &x, &out);
}

TEST_CASE("pointers to pointers match") {
  SharedArray<int> x = cases::ints(256);
  SharedArray<int*> table(16);
  SharedArray<int> out(16 * 3);
  const auto fill = qpu::compile([](Ptr<Int> p, Ptr<Ptr<Int>> t) { *t = p + index() * 9; });
  fill(&x, &table);
  cases::sameOnOne(
      out,
      [](Ptr<Ptr<Int>> t, Ptr<Int> r) {
        Ptr<Int> p = *t;
        gather(p);
        Int a;
        receive(a);
        r[0] = a;
        r[16] = *p;
        r[32] = **t;
      },
      &table, &out);
}

TEST_CASE("semaphores order the QPUs") {
  SharedArray<int> out(16 * 13);
  cases::sameOn(
      {2, 3}, out,
      [](Ptr<Int> r) {
        // The QPUs add to the sum one after the other, starting with QPU 0.
        If (any(me() == 0))
          *r = index();
          semaInc(0);
        Else
          Int turns = 0;
          While (any(turns == 0))
            semaDec(0);
            Int sum = *r;
            If (any(r[16 + 16] + 1 == me()))
              *r = sum * 2 + me();
              r[16 + 16] = me();
              turns = 1;
            End
            semaInc(0);
          End
        End
        semaInc(1);
        If (any(me() == 0))
          For (Int i = 0, i < numQPUs(), i = i + 1)
            semaDec(1);
          End
          semaDec(0);
        End
      },
      &out);
}

TEST_CASE("manual VPM access works with compiler-generated access") {
  SharedArray<int> a = cases::ints(256), out(16 * 24);
  cases::sameOnOne(
      out,
      [](Ptr<Int> p, Ptr<Int> r) {
        dmaSetReadPitch(64);
        dmaSetupRead(HORIZ, 4, 16, 16, 2);
        dmaStartRead(p);
        vpmSetupWrite(HORIZ, 20, 3);
        vpmPut(index());
        dmaWaitRead();
        vpmPut(index() * 2);
        r[0] = 5;  // executed while the kernel uses its VPM window
        vpmPut(index() * 3);
        store(7, r + 16);
        For (Int i = 0, i < 3, i = i + 1)
          vpmPut(index() + i);
          store(i, r + 32 + (i << 4));
        End
        vpmSetupRead(HORIZ, 4, 1, 2);
        for (int i = 0; i < 4; ++i) store(vpmGetInt(), r + 80 + 16 * i);
        vpmSetupRead(HORIZ, 6, 20, 3);
        Int x = vpmGetInt() - vpmGetInt();
        for (int i = 0; i < 4; ++i) store(vpmGetInt() + x, r + 144 + 16 * i);
        dmaSetupWrite(HORIZ, 2, 16 * 20, 8);
        dmaSetWriteStride(32);
        store(index() * 9, r + 208);
        dmaStartWrite(r + 224);
        dmaWaitWrite();
        dmaSetupRead(VERT, 16, 3, 16);
        x = r[224];  // loaded through the VPM, because two stores precede the load
        store(x, r + 272);
        dmaSetReadPitch(64);
        dmaStartRead(p);
        dmaWaitRead();
        vpmSetupRead(VERT, 2, 3);
        store(vpmGetInt(), r + 288);
        store(vpmGetInt(), r + 304);
        vpmSetupWrite(VERT, 40 + 4);
        vpmPut(index());
        vpmPut(index() * 11);
        dmaSetupWrite(VERT, 2, 16 * 32 + 12, 16);
        dmaSetWriteStride(0);
        dmaStartWrite(r + 320);
        dmaWaitWrite();
      },
      &a, &out);
}

TEST_CASE("manual VPM windows wrap on many QPUs") {
  SharedArray<int> out(16 * 2 * 12);
  cases::same(
      out,
      [](Ptr<Int> r) {
        r = r + (me() << 5);
        vpmSetupWrite(HORIZ, me() * 4, 2);
        vpmPut(index() + me());
        store(index(), r);
        vpmPut(index() * me());
        vpmSetupRead(HORIZ, 2, me() * 4, 2);
        Int a = vpmGetInt();
        Int b = vpmGetInt();
        store(a - b, r + 16);
      },
      &out);
}

TEST_CASE("manual VPM reads and writes keep their order") {
  SharedArray<int> x = cases::ints(32), out(16 * 6);
  const auto late = [](const qpu::IntExpr& a) {
    qpu::IntExpr v = a;
    for (int i = 1; i < 12; ++i) v = v * 3 + i;
    return v;
  };
  cases::sameOnOne(
      out,
      [late](Ptr<Int> p, Ptr<Int> r) {
        Int a = *p;
        // A long chain of operations computes each value, so the values are available late.
        vpmSetupWrite(HORIZ, 3);
        vpmPut(late(a));
        vpmSetupRead(HORIZ, 1, 3);
        Int b = vpmGetInt();
        // The compiler implements this load and this store through one shared VPM row.
        store(late(b), r);
        Int c = *p;
        store(index(), r + 16);
        dmaSetupRead(HORIZ, 1, 3 * 16);
        dmaStartRead(p + 16);
        dmaWaitRead();
        vpmSetupRead(HORIZ, 1, 3);
        Int d = vpmGetInt();
        vpmSetupWrite(HORIZ, 3);
        vpmPut(index());
        store(c, r + 32);
        store(d, r + 48);
      },
      &x, &out);
}

TEST_CASE("a DMA load between a VPM setup and the read matches") {
  SharedArray<int> a = cases::ints(256), out(64);
  cases::sameOnOne(
      out,
      [](Ptr<Int> p, Ptr<Int> r) {
        dmaSetReadPitch(64);
        dmaSetupRead(HORIZ, 2, 0);
        dmaStartRead(p);
        dmaWaitRead();
        dmaSetupRead(HORIZ, 2, 16 * 4);
        vpmSetupRead(HORIZ, 2, 0);
        dmaStartRead(p + 32);
        Int x = vpmGetInt();
        Int y = vpmGetInt();
        dmaWaitRead();
        vpmSetupRead(HORIZ, 2, 4);
        dmaWaitRead();
        Int u = vpmGetInt();
        Int v = vpmGetInt();
        store(x, r);
        store(y, r + 16);
        store(u, r + 32);
        store(v, r + 48);
      },
      &a, &out);
}

TEST_CASE("assigning a variable to itself in Where keeps it") {
  SharedArray<int> out(16);
  const auto kernel = [](Ptr<Int> r) {
    Int x = index() + 1;
    Where (x < 8)
      x = x;
    End
    *r = x;
  };
  cases::sameOnOne(out, kernel, &out);
  qpu::compile(kernel)(&out);
  for (int i = 0; i < 16; ++i) CHECK(out[i] == i + 1);
}

// --- random programs ---

namespace cases {

inline int setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::atoi(value) : otherwise;
}

}  // namespace cases

// QPU_RANDOM_PROGRAMS sets the number of programs, QPU_RANDOM_SEED sets the first seed, and
// QPU_RANDOM_LENGTH sets the maximum number of statements.
TEST_CASE("kernels with 200 live vectors match") {
  constexpr int count = 200;
  SharedArray<int> in = cases::ints(16 * count);
  SharedArray<int> out(12 * 16 * 4);
  const auto mixed = [](std::vector<Int>& v) {
    Int sum = 0;
    for (Int& x : v) sum = (sum * 3) ^ x;
    for (auto x = v.rbegin(); x != v.rend(); ++x) sum = (sum * 5) ^ *x;
    return sum;
  };
  const auto made = [](auto make) {
    std::vector<Int> v;
    v.reserve(count);
    for (int i = 0; i < count; ++i) v.emplace_back(make(i));
    return v;
  };
  SUBCASE("each computed from another one") {
    cases::sameOn({1, 12}, out, [&](Ptr<Int> p, Ptr<Int> q) {
      Int x = p[me() << 4];
      std::vector<Int> v = made([&x](int i) {
        x = (x * 5) ^ i;
        return x;
      });
      q[me() << 4] = mixed(v);
    }, &in, &out);
  }
  SUBCASE("loaded from memory") {
    cases::sameOn({1, 12}, out, [&](Ptr<Int> p, Ptr<Int> q) {
      std::vector<Int> v = made([&p](int i) { return p[16 * i]; });
      q[me() << 4] = mixed(v) + me();
    }, &in, &out);
  }
  SUBCASE("modified in a loop, with stores in between") {
    cases::sameOn({1, 3}, out, [&](Ptr<Int> p, Ptr<Int> q) {
      std::vector<Int> v = made([&p](int i) { return p[16 * i]; });
      Ptr<Int> to = q + me() * 64;
      For (Int n = 0, n < 3, n = n + 1)
        for (std::size_t i = 0; i < v.size(); ++i) v[i] = (v[i] ^ n) + v[(i + 7) % v.size()];
        store(v[17], to + (n << 4));
      End
      to[48] = mixed(v);
    }, &in, &out);
  }
  SUBCASE("modified in branches and under masks") {
    cases::sameOn({1, 2}, out, [&](Ptr<Int> p, Ptr<Int> q) {
      std::vector<Int> v = made([&p](int i) { return p[16 * i] + me(); });
      If (any(v[3] > v[5]))
        for (Int& x : v) x = x * 3;
      Else
        for (Int& x : v) x = x - 1;
      End
      Where (v[0] > 4)
        for (std::size_t i = 0; i < v.size(); i += 3) v[i] = v[(i + 1) % v.size()];
      End
      q[me() << 4] = mixed(v);
    }, &in, &out);
  }
  SUBCASE("gathered, with eight requests in flight") {
    cases::sameOn({1, 2}, out, [&](Ptr<Int> p, Ptr<Int> q) {
      std::vector<Int> v;
      v.reserve(count);
      for (int i = 0; i < 8; ++i) gather(p + (16 * i + index()));
      for (int i = 0; i < count; ++i) {
        v.emplace_back();
        receive(v.back());
        if (i + 8 < count) gather(p + (16 * (i + 8) + index()));
      }
      q[me() << 4] = mixed(v) + me();
    }, &in, &out);
  }
}

TEST_CASE("random programs match the interpreter") {
  const int count = cases::setting("QPU_RANDOM_PROGRAMS", 300);
  const int first = cases::setting("QPU_RANDOM_SEED", 1);
  const int length = cases::setting("QPU_RANDOM_LENGTH", 1000);
  SharedArray<int> in = cases::patterns(test::kInputWords, 7), out(12 * test::kAreaWords);
  const cases::Words uniforms = {cases::word(&in), cases::word(&out), 5U, cases::word(1.75F)};
  for (int seed = first; seed < first + count; ++seed) {
    CAPTURE(seed);
    const qpu::detail::Source source = test::trace(
        [seed, length](Ptr<Int> p, Ptr<Int> q, Int n, Float x) {
          test::RandomProgram(static_cast<std::uint32_t>(seed), length)(p, q, n, x);
        },
        "random");
    qpu::detail::checkGathers(source);
    const int qpus = 1 + seed % 12;
    CAPTURE(qpus);
    std::fill(out.begin(), out.end(), 0);
    qpu::interp::run(qpu::interp::lower(source), qpus, uniforms.data(), uniforms.size());
    const cases::Words expected = cases::wordsOf(out);
    for (int level = 0; level <= 2; ++level) {
      CAPTURE(level);
      qpu::compiler::Options options;
      options.level = level;
      if (seed % 4 == 0) options.fileRegisters = 12 + seed / 4 % 8;
      CAPTURE(options.fileRegisters);
      std::fill(out.begin(), out.end(), 0);
      execute(source, options, qpus, uniforms);
      const cases::Words words = cases::wordsOf(out);
      const auto wrong = std::mismatch(words.begin(), words.end(), expected.begin()).first;
      const auto place = static_cast<int>(wrong - words.begin());
      CAPTURE(place);
      REQUIRE(place == static_cast<int>(words.size()));
    }
  }
}

#endif
