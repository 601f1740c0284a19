// Tests loads and stores with a stride, and Int++.
#include "tests/run.hpp"

#include <algorithm>
#include <random>
#include <vector>

using test::contains;
using test::Ints;
using test::ints;
using test::thrown;

namespace {

SharedArray<int> counting(int n) {
  SharedArray<int> a(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) a[i] = i;
  return a;
}

// Sorts 32 integers in place with an odd-even transposition sort.
void sortOddEven(Ptr<Int> p) {
  setReadStride(1);
  setWriteStride(1);
  Int even = *p;
  Int odd = *(p + 1);
  For (Int phase = 0, phase < 16, phase++)
    Int low = min(even, odd);
    odd = max(even, odd);
    even = low;
    Int right = rotate(even, 15);
    Int smaller = min(odd, right);
    Int greater = rotate(max(odd, right), 1);
    Where (index() != 15)
      odd = smaller;
    End
    Where (index() != 0)
      even = greater;
    End
  End
  *p = even;
  *(p + 1) = odd;
}

template <typename F>
std::string refused(F f) {
  return thrown<qpu::CompileError>([f] { (void)compile(f, "bad"); });
}

}  // namespace

TEST_CASE("Int++ adds one to every element") {
  const auto incremented = [](auto f) {
    Ints expected = ints([](Int& x) { return x + 3; });
    CHECK(ints(f) == expected);
  };
  incremented([](Int& x) {
    x++;
    ++x;
    return ++x;
  });
  incremented([](Int& x) {
    For (Int i = 0, i < 3, i++)
      x++;
    End
    return x;
  });
  CHECK(ints([](Int& x) {
          Where (index() < 2)
            x++;
          End
          return x;
        })[2] == 2);
}

TEST_CASE("a strided load skips elements and ends at its last") {
  for (const int stride : {0, 1, 2, 3, 7, 14, 15, 16, 17, 100, 2047}) {
    CAPTURE(stride);
    const int words = 15 * (stride + 1) + 1;
    SharedArray<int> in = counting(words), out(48);
    compile([&](Ptr<Int> p, Ptr<Int> q) {
      setReadStride(stride);
      q[0] = *p;
      Int twice = p[0] + p[0];
      q[16] = twice;
      setReadStride(0);
      q[32] = *p;
    })(&in, &out);
    for (int i = 0; i < 16; ++i) {
      CHECK(out[i] == i * (stride + 1));
      CHECK(out[16 + i] == 2 * i * (stride + 1));
      CHECK(out[32 + i] == i);
    }
  }
  SharedArray<int> small = counting(30), out(16);
  CHECK_THROWS_AS(compile([](Ptr<Int> p, Ptr<Int> q) {
                    setReadStride(1);
                    *q = *p;
                  })(&small, &out),
                  qpu::BoundsError);
}

TEST_CASE("a strided store keeps the words in between") {
  for (const int stride : {1, 2, 15, 63, 2047}) {
    CAPTURE(stride);
    const int step = stride + 1;
    SharedArray<float> out(static_cast<std::size_t>(15 * step + 1 + 16));
    for (float& f : out) f = -1;
    compile([&](Ptr<Float> p, Int last) {
      setWriteStride(stride);
      *p = toFloat(index()) * 0.5F;
      setWriteStride(0);
      store(7, p + last + 1, 1);
    })(&out, 15 * step);
    for (int i = 0; i < 15 * step + 1; ++i) {
      const int element = i / step;
      CHECK(out[i] == (i % step == 0 ? 0.5F * static_cast<float>(element) : -1.0F));
    }
    CHECK(out[15 * step + 1] == 7);
    CHECK(out[15 * step + 2] == -1);
  }
}

TEST_CASE("a strided load reads what a strided store wrote") {
  SharedArray<int> a = counting(64), out(16);
  auto k = compile([](Ptr<Int> p, Ptr<Int> q) {
    setWriteStride(2);
    p[1] = index() * 5;
    setReadStride(2);
    *q = p[1] + 1;
  });
  // The stride also applies to the store to `out`.
  SharedArray<int> wide(46);
  k(&a, &wide);
  for (int i = 0; i < 16; ++i) {
    CHECK(a[1 + 3 * i] == 5 * i);
    CHECK(wide[3 * i] == 5 * i + 1);
  }
}

TEST_CASE("pointers and gathers ignore strides") {
  SharedArray<int> a = counting(64), out(48);
  SharedArray<int*> rows(31);
  for (std::size_t i = 0; i < 31; ++i) rows[i] = a.pointer(i);
  compile([](Ptr<Int> p, Ptr<Ptr<Int>> r, Ptr<Int> q) {
    setReadStride(1);
    Ptr<Int> every = *r;
    gather(p + index());
    gather(every);
    Int x, y;
    receive(x);
    receive(y);
    store(x, q);
    store(y, q + 16);
  })(&a, &rows, &out);
  for (int i = 0; i < 16; ++i) {
    CHECK(out[i] == i);
    CHECK(out[16 + i] == 2 * i);
  }
}

TEST_CASE("odd-even sort works on interleaved halves") {
  std::mt19937 random(3);
  SharedArray<int> a(32);
  auto k = compile(sortOddEven);
  for (int round = 0; round < 5; ++round) {
    std::vector<int> expected;
    for (int& x : a) {
      x = static_cast<int>(random() % 1000) - 500;
      expected.push_back(x);
    }
    std::sort(expected.begin(), expected.end());
    k.call(&a);
    CHECK(std::equal(expected.begin(), expected.end(), a.begin()));
  }
}

TEST_CASE("invalid strides are rejected") {
  CHECK(contains(refused([](Ptr<Int>) { setReadStride(-1); }),
                 "the stride is -1, but must be 0..2047"));
  CHECK(contains(refused([](Ptr<Int>) { setWriteStride(2048); }), "setWriteStride at"));
  CHECK(contains(refused([](Ptr<Int> p) {
                   If (any(*p == 0))
                     setReadStride(1);
                   End
                 }),
                 "not allowed inside If at"));
  CHECK(contains(refused([](Ptr<Int> p) {
                   setWriteStride(1);
                   store(index(), p, 3);
                 }),
                 "not allowed with a stride"));
  CHECK(contains(refused([](Ptr<Int> p) {
                   setWriteStride(1);
                   Where (index() == 0)
                     *p = 1;
                   End
                 }),
                 "not allowed inside Where"));
  // The stride does not apply to the next kernel.
  (void)compile([](Ptr<Int>) { setReadStride(5); });
  SharedArray<int> a = counting(16), out(16);
  compile([](Ptr<Int> p, Ptr<Int> q) { *q = *p; })(&a, &out);
  CHECK(out[15] == 15);
}
