// Tests each construct of the language with vectors whose results are known.
#include <cmath>

#include "tests/run.hpp"

using test::Ints;
using test::ints;

namespace {

template <typename F>
Ints expected(F f) {
  Ints e{};
  for (int i = 0; i < 16; ++i) e[static_cast<std::size_t>(i)] = f(i);
  return e;
}

}  // namespace

TEST_CASE("a scalar initialiser is copied to all elements") {
  CHECK(ints([](Int&) -> Int { return 7; }) == expected([](int) { return 7; }));
}

TEST_CASE("Int operators work per element") {
  CHECK(ints([](Int& x) { return x + 3; }) == expected([](int i) { return i + 3; }));
  CHECK(ints([](Int& x) { return 3 - x; }) == expected([](int i) { return 3 - i; }));
  CHECK(ints([](Int& x) { return -x; }) == expected([](int i) { return -i; }));
  CHECK(ints([](Int& x) { return x * x; }) == expected([](int i) { return i * i; }));
  CHECK(ints([](Int& x) { return min(x, 5); }) == expected([](int i) { return i < 5 ? i : 5; }));
  CHECK(ints([](Int& x) { return max(x - 8, -2); }) ==
        expected([](int i) { return i - 8 > -2 ? i - 8 : -2; }));
  CHECK(ints([](Int& x) { return (x << 2) >> 1; }) == expected([](int i) { return i << 1; }));
  CHECK(ints([](Int& x) { return (x - 8) >> 1; }) == expected([](int i) { return (i - 8) >> 1; }));
  CHECK(ints([](Int& x) { return (x & 6) | 1; }) == expected([](int i) { return (i & 6) | 1; }));
  CHECK(ints([](Int& x) { return x ^ ~x; }) == expected([](int) { return -1; }));
  CHECK(ints([](Int& x) { return shr(x - 1, 28); })[0] == 15);
  CHECK(ints([](Int& x) { return ror(x + 1, 1); })[0] == INT32_MIN);
}

TEST_CASE("compound assignments equal the plain operators") {
  CHECK(ints([](Int& x) {
          x += 1;
          x *= 3;
          x -= 2;
          x <<= 4;
          x >>= 1;
          x |= 1;
          x ^= 2;
          x &= 0xff;
          return x;
        }) == expected([](int i) { return ((((i + 1) * 3 - 2) << 3 | 1) ^ 2) & 0xff; }));
}

TEST_CASE("comparisons, and, or, not select elements") {
  const auto where = [](auto condition) {
    return ints([condition](Int& x) -> Int {
      Int r = 0;
      Where (condition(x))
        r = 1;
      End
      return r;
    });
  };
  CHECK(where([](Int& x) { return x == 3; }) == expected([](int i) { return i == 3; }));
  CHECK(where([](Int& x) { return x != 3; }) == expected([](int i) { return i != 3; }));
  CHECK(where([](Int& x) { return x < 3; }) == expected([](int i) { return i < 3; }));
  CHECK(where([](Int& x) { return x <= 3; }) == expected([](int i) { return i <= 3; }));
  CHECK(where([](Int& x) { return x > 3; }) == expected([](int i) { return i > 3; }));
  CHECK(where([](Int& x) { return x >= 3; }) == expected([](int i) { return i >= 3; }));
  CHECK(where([](Int& x) { return x > 3 && x < 9; }) ==
        expected([](int i) { return i > 3 && i < 9; }));
  CHECK(where([](Int& x) { return x < 3 || !(x < 9); }) ==
        expected([](int i) { return i < 3 || i >= 9; }));
  CHECK(where([](Int& x) { return toFloat(x) * 0.5F >= 3.0F; }) ==
        expected([](int i) { return i >= 6; }));
  CHECK(where([](Int& x) { return toFloat(x) <= 3.0F; }) == expected([](int i) { return i <= 3; }));
  CHECK(where([](Int& x) { return toFloat(x) > 3.0F; }) == expected([](int i) { return i > 3; }));
  CHECK(where([](Int& x) { return toFloat(x) < 3.0F; }) == expected([](int i) { return i < 3; }));
  CHECK(where([](Int& x) { return toFloat(x) == 3.0F; }) ==
        expected([](int i) { return i == 3; }));
  CHECK(where([](Int& x) { return toFloat(x) != 3.0F; }) ==
        expected([](int i) { return i != 3; }));
}

TEST_CASE("Where has an Else and nests") {
  CHECK(ints([](Int& x) {
          Int r = -1;
          Where (x < 8)
            r = 1;
            Where (x < 4)
              r = 2;
            Else
              r = r + 10;
            End
          Else
            Where (x == 15)
              r = 5;
            End
          End
          return r;
        }) == expected([](int i) { return i < 4 ? 2 : i < 8 ? 11 : i == 15 ? 5 : -1; }));
}

TEST_CASE("assigning a variable to itself in Where keeps it") {
  CHECK(ints([](Int& x) {
          Where (x > 4)
            x = x;
          End
          return x;
        }) == ints([](Int& x) { return x; }));
}

TEST_CASE("Where keeps its mask if the condition's variables change") {
  CHECK(ints([](Int& x) {
          Where (x > 4)
            x = 0;
            x = x + 1;
          Else
            x = 9;
          End
          return x;
        }) == expected([](int i) { return i > 4 ? 1 : 9; }));
}

TEST_CASE("If branches on any and all, with Else and nesting") {
  const auto branch = [](auto condition) {
    return ints([condition](Int& x) -> Int {
      Int r = 0;
      If (condition(x))
        If (any(x == 0))
          r = 1;
        Else
          r = 3;
        End
      Else
        r = 2;
      End
      return r;
    })[0];
  };
  CHECK(branch([](Int& x) { return any(x == 15); }) == 1);
  CHECK(branch([](Int& x) { return any(x == 16); }) == 2);
  CHECK(branch([](Int& x) { return all(x >= 0); }) == 1);
  CHECK(branch([](Int& x) { return all(x > 0); }) == 2);
  CHECK(branch([](Int& x) { return !all(x > 0); }) == 1);
  CHECK(branch([](Int& x) { return any(x == 1) && all(x < 16); }) == 1);
  CHECK(branch([](Int& x) { return any(x == 99) || all(x < 15); }) == 2);
  // A condition without any() or all() is treated as any().
  CHECK(branch([](Int& x) { return x == 15; }) == 1);
}

TEST_CASE("If inside Where keeps the mask") {
  CHECK(ints([](Int& x) {
          Int r = 0;
          Where (x < 5)
            If (any(x == 15))
              r = 4;
            End
          End
          return r;
        }) == expected([](int i) { return i < 5 ? 4 : 0; }));
}

TEST_CASE("While checks its condition before the first iteration") {
  CHECK(ints([](Int& x) {
          Int n = 0;
          While (any(x < 20))
            x = x + 1;
            n = n + 1;
          End
          While (any(n > 100))
            n = 0;
          End
          return n;
        }) == expected([](int) { return 20; }));
}

TEST_CASE("For runs its step after the body") {
  CHECK(ints([](Int& x) {
          Int sum = 0;
          For (Int i = 0, i < 5, i = i + 1)
            For (Int j = 0, j < i, j = j + 1)
              sum = sum + 10;
            End
            sum = sum + i;
          End
          return sum + x;
        }) == expected([](int i) { return 110 + i; }));
}

TEST_CASE("a construct is one C++ statement") {
  const auto count = [](bool wanted) {
    return ints([wanted](Int& x) {
      Int r = x;
      if (wanted)
        For (Int i = 0, i < 3, i = i + 1)
          r = r + 100;
        End
      for (int i = 0; i < 2; ++i)
        If (any(x == 0))
          r = r + 1;
        Else
          r = r - 1;
        End
      return r;
    });
  };
  CHECK(count(true) == expected([](int i) { return i + 302; }));
  CHECK(count(false) == expected([](int i) { return i + 2; }));
}

TEST_CASE("rotate moves element 0 to element n") {
  for (int n = 0; n < 16; ++n) {
    CHECK(ints([n](Int& x) { return rotate(x, n); }) ==
          expected([n](int i) { return (i - n + 16) % 16; }));
    CHECK(ints([n](Int& x) {
            Int amount = x + n;  // only element 0 is used, which is n
            return rotate(x, amount);
          }) == expected([n](int i) { return (i - n + 16) % 16; }));
  }
  CHECK(ints([](Int& x) { return toInt(rotate(toFloat(x), 17)); }) ==
        expected([](int i) { return (i + 15) % 16; }));
}

TEST_CASE("rotate may write the vector it reads") {
  CHECK(ints([](Int& x) {
          x = rotate(x, 3);
          return x;
        }) == expected([](int i) { return (i + 13) % 16; }));
}

TEST_CASE("Float arithmetic and conversions have known results") {
  CHECK(ints([](Int& x) {
          Float f = toFloat(x) * 0.5;
          f = f + 1;
          f = max(min(f, 6), 2.5F);
          f -= 0.25F;
          f += 1.0F;
          f *= 2.0F;
          return toInt(f - 0.5F);
        }) == expected([](int i) {
          float f = static_cast<float>(i) * 0.5F + 1;
          f = f < 6 ? f : 6;
          f = f > 2.5F ? f : 2.5F;
          return static_cast<int>((f + 0.75F) * 2 - 0.5F);
        }));
  CHECK(ints([](Int& x) { return toInt(-toFloat(x)); }) == expected([](int i) { return -i; }));
}

TEST_CASE("p[i] counts elements, *p loads from the first address") {
  SharedArray<int> in(64), out(16);
  for (int i = 0; i < 64; ++i) in[i] = i;
  compile([](Ptr<Int> p, Ptr<Int> q) {
    Ptr<Int> far = p + index() * 3;  // only the address in element 0 is used
    *q = p[16] + *far + (p + 32)[-16];
  })(&in, &out);
  for (int i = 0; i < 16; ++i) CHECK(out[i] == (16 + i) + i + (16 + i));
}

TEST_CASE("gather fetches from sixteen addresses") {
  SharedArray<float> in(64), out(32);
  for (int i = 0; i < 64; ++i) in[i] = static_cast<float>(i);
  compile([](Ptr<Float> p, Ptr<Float> q) {
    gather(p + 63 - index() * 4);
    gather(p);  // all elements have the same address
    Float x;
    receive(x);
    store(x, q);
    receive(x);
    store(x, q + 16);
  })(&in, &out);
  for (int i = 0; i < 16; ++i) {
    CHECK(out[i] == static_cast<float>(63 - 4 * i));
    CHECK(out[16 + i] == 0.0F);
  }
}

TEST_CASE("gather reads at the request, not at receive") {
  SharedArray<int> a(16);
  compile([](Ptr<Int> p) {
    gather(p + index());
    *p = 5;
    Int old;
    receive(old);
    *p = *p * 10 + old;
  })(&a);
  CHECK(a[0] == 50);
}

TEST_CASE("receive inside Where changes the selected elements") {
  SharedArray<int> a(16);
  for (int i = 0; i < 16; ++i) a[i] = 100 + i;
  compile([](Ptr<Int> p) {
    Int x = index();
    gather(p + index());
    Where (index() > 7)
      receive(x);
    End
    *p = x;
  })(&a);
  for (int i = 0; i < 16; ++i) CHECK(a[i] == (i > 7 ? 100 + i : i));
}

TEST_CASE("Ptr<Ptr<T>> accesses arrays of arrays") {
  SharedArray<float> first(32), second(32), out(32);
  for (int i = 0; i < 32; ++i) {
    first[i] = static_cast<float>(i);
    second[i] = static_cast<float>(100 + i);
  }
  SharedArray<float*> rows(32);
  rows[0] = first.getPointer();
  rows[1] = &second;
  for (int i = 2; i < 32; ++i) rows[i] = second.pointer(16);
  CHECK(static_cast<float*>(rows[1]) == second.getPointer());
  compile([](Ptr<Ptr<Float>> p, Ptr<Float> q) {
    Ptr<Float> a = *p;
    Ptr<Float> b = p[1];
    q[0] = *a + b[16];
    q[16] = **p + (*(p + 2))[0] + *p[1];
  })(&rows, &out);
  for (int i = 0; i < 16; ++i) {
    CHECK(out[i] == static_cast<float>(i + 116 + i));
    CHECK(out[16 + i] == static_cast<float>(i + 116 + i + 100 + i));
  }
}

TEST_CASE("pointers can be stored and gathered") {
  SharedArray<int> data(32), out(16);
  for (int i = 0; i < 32; ++i) data[i] = i;
  SharedArray<int*> table(16);
  compile([](Ptr<Int> p, Ptr<Ptr<Int>> t, Ptr<Int> q) {
    Ptr<Int> own = p + index() * 2;
    *t = own;  // waits for the store, because the following gather does not wait
    Ptr<Int> again;
    gather(t + index());
    receive(again);
    gather(again);
    Int x;
    receive(x);
    *q = x;
  })(&data, &table, &out);
  for (int i = 0; i < 16; ++i) {
    CHECK(out[i] == 2 * i);
    CHECK(table[i].address() == data.getAddress() + static_cast<std::uint32_t>(8 * i));
  }
}

TEST_CASE("me and numQPUs identify the QPUs") {
  SharedArray<int> out(12 * 16);
  auto k = compile([](Ptr<Int> p) { p[me() << 4] = me() * 100 + numQPUs(); });
  for (int n = 1; n <= 12; ++n) {
    k.setNumQPUs(n);
    k(&out);
    for (int q = 0; q < n; ++q) CHECK(out[16 * q + 15] == 100 * q + n);
  }
}

TEST_CASE("kernel functions may modify parameters by reference") {
  SharedArray<int> out(16);
  auto k = compile([](Int& n, const Float& f, Ptr<Int>& p) {
    n = n + toInt(f);
    *p = n;
  });
  for (int run = 0; run < 2; ++run) {
    k(40, 2.75F, &out);
    CHECK(out[3] == 42);
  }
}

TEST_CASE("a kernel function runs once, at compile") {
  int traced = 0;
  SharedArray<int> out(16);
  const auto k = compile([&traced](Int n, Ptr<Int> p) {
    ++traced;
    *p = n;
  });
  for (int n = 0; n < 5; ++n) k(n, &out);
  CHECK(out[0] == 4);
  CHECK(traced == 1);
}

TEST_CASE("copies of a kernel have separate QPU counts") {
  SharedArray<int> out(32);
  auto one = compile([](Ptr<Int> p) { p[me() << 4] = numQPUs(); }, "count");
  auto two = one;
  two.setNumQPUs(2);
  one(&out);
  CHECK(out[0] == 1);
  two(&out);
  CHECK(out[0] == 2);
  CHECK(std::string(two.name()) == "count");
}

TEST_CASE("kernels may have many variables and statements") {
  const int n = 3000;
  CHECK(ints([](Int& x) {
          Int sum = 0;
          for (int i = 0; i < n; ++i) {
            Int term = x + i;
            Where (term > i)
              sum = sum + 1;
            End
          }
          return sum;
        }) == expected([](int i) { return i > 0 ? n : 0; }));
}

TEST_CASE("a shared subexpression is computed once") {
  CHECK(ints([](Int& x) {
          IntExpr e = x;
          for (int i = 0; i < 40; ++i) e = e + e - x;
          return e;
        }) == expected([](int i) { return i; }));
}

TEST_CASE("mul24 equals the product of Int") {
  CHECK(ints([](Int& x) { return mul24(x - 8, 5); }) ==
        expected([](int i) { return static_cast<int>((static_cast<unsigned>(i - 8) & 0xffffffU) * 5U); }));
}

TEST_CASE("abs clears the sign") {
  CHECK(ints([](Int& x) { return toInt(abs(toFloat(x - 8))); }) ==
        expected([](int i) { return i < 8 ? 8 - i : i - 8; }));
  CHECK(ints([](Int& x) { return asInt(abs(asFloat(x | INT32_MIN))); }) ==
        expected([](int i) { return i; }));
}

TEST_CASE("asInt and asFloat keep the bits") {
  CHECK(ints([](Int& x) { return asInt(asFloat(x + 0x3f800000) + 0.0F); }) ==
        expected([](int i) { return i + 0x3f800000; }));
}

TEST_CASE("broadcast copies one element to all") {
  for (int k = 0; k < 16; ++k) {
    CHECK(ints([k](Int& x) { return broadcast(x * 3, k); }) ==
          expected([k](int) { return 3 * k; }));
    CHECK(ints([k](Int& x) { return toInt(broadcast(toFloat(x), k)); }) ==
          expected([k](int) { return k; }));
  }
}

TEST_CASE("special functions are within their error bounds") {
  constexpr int vectors = 64;
  SharedArray<float> in(16 * vectors), out(64 * vectors);
  for (int i = 0; i < 16 * vectors; ++i) in[i] = 0.01F * std::exp(0.01F * static_cast<float>(i));
  compile([](Ptr<Float> p, Ptr<Float> q) {
    For (Int i = 0, i < vectors, i = i + 1)
      Float x = *p;
      q[0] = recip(x);
      q[16] = rsqrt(x);
      q[32] = exp2(x);
      q[48] = log2(x);
      p = p + 16;
      q = q + 64;
    End
  })(&in, &out);
  // The errors are relative for recip, rsqrt and exp2, and absolute for log2 where its result is
  // small.
  std::array<double, 4> most{}, sum{};
  for (int i = 0; i < 16 * vectors; ++i) {
    const auto x = static_cast<double>(in[i]);
    const std::array<double, 4> exact{1 / x, 1 / std::sqrt(x), std::exp2(x), std::log2(x)};
    for (std::size_t f = 0; f < 4; ++f) {
      if (std::isinf(static_cast<float>(exact[f]))) continue;
      const int at = 64 * (i / 16) + 16 * static_cast<int>(f) + i % 16;
      const auto found = static_cast<double>(out[at]);
      const double size = f == 3 ? std::fmax(std::fabs(exact[f]), 1) : exact[f];
      const double error = std::fabs(found - exact[f]) / size;
      most[f] = std::fmax(most[f], error);
      sum[f] += error / (16 * vectors);
    }
  }
  for (std::size_t f = 0; f < 4; ++f) {
    INFO("function ", f, ", most ", most[f], ", mean ", sum[f]);
    CHECK(most[f] < 1e-4);
    CHECK(most[f] > 2e-5);
    CHECK(sum[f] > 2e-6);
  }
}

TEST_CASE("special functions match published hardware results") {
  SharedArray<float> out(64);
  compile([](Ptr<Float> q) {
    const auto at = [](int i, float x, Float& v) {
      Where (index() == i)
        v = x;
      End
    };
    Float x = 0, y = 2;
    at(1, 1, x);
    at(2, 2, x);
    at(1, 100, y);
    q[0] = exp2(x);
    q[16] = log2(y);
  })(&out);
  CHECK(out[0] == doctest::Approx(1.000031).epsilon(1e-6));
  CHECK(out[1] == doctest::Approx(2.000061).epsilon(1e-6));
  CHECK(out[2] == doctest::Approx(4.000122).epsilon(1e-6));
  CHECK(out[16] == 1);
  CHECK(out[17] == doctest::Approx(6.643829).epsilon(1e-6));
}

TEST_CASE("store of n words does not change the following words") {
  SharedArray<int> out(32);
  auto k = compile([](Ptr<Int> p, Int n) {
    store(index() + 1, p, n);
    store(index() + 101, p + 20, 3);
  });
  for (int n = 1; n <= 16; ++n) {
    for (int& x : out) x = -1;
    k(&out, n);
    for (int i = 0; i < 32; ++i)
      CHECK(out[i] == (i < n ? i + 1 : i >= 20 && i < 23 ? 81 + i : -1));
  }
}

TEST_CASE("store of n words needs no room for 16") {
  SharedArray<float> out(3);
  compile([](Ptr<Float> p) { store(toFloat(index()), p + 1, 2); })(&out);
  CHECK(out[0] == 0.0F);
  CHECK(out[1] == 0.0F);
  CHECK(out[2] == 1.0F);
  SharedArray<int*> table(2);
  SharedArray<int> data(16);
  compile([](Ptr<Ptr<Int>> t, Ptr<Int> p) { store(p + index(), t, 2); })(&table, &data);
  CHECK(table[1].address() == data.getAddress() + 4);
}

TEST_CASE("constant folding gives the computed results") {
  const auto both = [](auto f) {
    const Ints folded = ints([f](Int&) -> Int { return f(IntExpr(-77), IntExpr(37)); });
    const Ints run = ints([f](Int&) -> Int {
      Int a = -77, b = 37;
      return f(a, b);
    });
    CHECK(folded == run);
  };
  both([](const IntExpr& a, const IntExpr& b) { return a + b; });
  both([](const IntExpr& a, const IntExpr& b) { return a - b; });
  both([](const IntExpr& a, const IntExpr& b) { return a * b; });
  both([](const IntExpr& a, const IntExpr& b) { return a << b; });
  both([](const IntExpr& a, const IntExpr& b) { return a >> b; });
  both([](const IntExpr& a, const IntExpr& b) { return shr(a, b); });
  both([](const IntExpr& a, const IntExpr& b) { return ror(a, b); });
  both([](const IntExpr& a, const IntExpr& b) { return a & b; });
  both([](const IntExpr& a, const IntExpr& b) { return a | b; });
  both([](const IntExpr& a, const IntExpr& b) { return a ^ b; });
  both([](const IntExpr& a, const IntExpr& b) { return min(a, b); });
  both([](const IntExpr& a, const IntExpr& b) { return max(a, b); });
  both([](const IntExpr& a, const IntExpr&) { return ~a; });
  both([](const IntExpr& a, const IntExpr&) { return rotate(a, 3); });
  both([](const IntExpr& a, const IntExpr&) { return broadcast(a, 7); });
}
