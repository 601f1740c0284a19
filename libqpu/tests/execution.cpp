// Tests errors that occur while a kernel runs (bounds, gathers, semaphores, VPM), and results
// that must not depend on the number of QPUs.
#include <algorithm>
#include <vector>

#include "tests/run.hpp"

using test::contains;
using test::thrown;

TEST_CASE("the error for a store past the end names its location") {
  SharedArray<int> a(16 * 3);
  auto k = compile([](Ptr<Int> p) { store(me(), p + (me() << 4), qpu::Location("k.cpp", 7)); },
                   "overrun");
  k.setNumQPUs(3);
  k(&a);
  k.setNumQPUs(4);
  try {
    k(&a);
    FAIL("no exception");
  } catch (const qpu::BoundsError& e) {
    const std::string text = e.what();
    CHECK(e.qpu() == 3);
    CHECK(e.address() == a.getAddress() + 192);
    CHECK(std::string(e.construct()) == "store");
    if (test::onEmulator()) {
      CHECK(contains(text, "kernel 'overrun', QPU 3, instruction "));
      CHECK(contains(text, "of store at k.cpp:7: "));
      return;
    }
    CHECK(contains(text, "kernel 'overrun', QPU 3, store at k.cpp:7: writing 16 words"));
    CHECK(contains(text, "nearest is the SharedArray of 48 elements"));
    CHECK(contains(text, "0 bytes past its end"));
  }
  CHECK(a[40] == 2);
}

TEST_CASE("loads at and beyond both ends are checked") {
  SharedArray<int> a(32), out(16);
  auto k = compile([](Int offset, Ptr<Int> p, Ptr<Int> q) { *q = p[offset]; });
  for (int i = 0; i < 32; ++i) a[i] = i;
  k(0, &a, &out);
  k(16, &a, &out);
  CHECK(out[15] == 31);
  CHECK_THROWS_AS(k(17, &a, &out), qpu::BoundsError);
  CHECK_THROWS_AS(k(-1, &a, &out), qpu::BoundsError);
  CHECK(contains(thrown<qpu::BoundsError>([&] { k(-4, &a, &out); }), "16 bytes before its start"));
  CHECK_THROWS_AS(k(1 << 22, &a, &out), qpu::BoundsError);
}

TEST_CASE("arrays are not adjacent in memory") {
  SharedArray<int> a(16), b(16);
  auto k = compile([](Int offset, Ptr<Int> p) { p[offset] = 1; });
  for (int offset = 1; offset <= 32; ++offset)
    CHECK_THROWS_AS(k(offset, &a), qpu::BoundsError);
  CHECK(std::count(b.begin(), b.end(), 0) == 16);
}

TEST_CASE("accessing a released array is an error") {
  SharedArray<int*> table(16);
  {
    SharedArray<int> gone(16);
    table[0] = gone;
  }
  CHECK_THROWS_AS(compile([](Ptr<Ptr<Int>> t) { **t = 1; })(&table), qpu::BoundsError);
}

TEST_CASE("misaligned accesses are errors, gathers drop low bits") {
  SharedArray<int> a(32), out(16);
  for (int i = 0; i < 32; ++i) a[i] = i;
  SharedArray<int*> table(16);
  for (int i = 0; i < 16; ++i)
    table[i] = qpu::BusPointer<int>::fromAddress(a.getAddress() + static_cast<unsigned>(4 * i + 3));
  const auto loading = [&] {
    compile([](Ptr<Ptr<Int>> t, Ptr<Int> q) { *q = **t; })(&table, &out);
  };
  // In compiled code, this load is a gather.
  if (test::onEmulator())
    loading();
  else
    CHECK(contains(thrown<qpu::BoundsError>(loading), "not a multiple of 4"));
  compile([](Ptr<Ptr<Int>> t, Ptr<Int> q) {
    gather(*t);
    Int x;
    receive(x);
    *q = x;
  })(&table, &out);
  for (int i = 0; i < 16; ++i) CHECK(out[i] == i);
}

namespace {

// Doubles the first n numbers, and requests one more block beyond the end.
template <typename Drain>
void prefetching(SharedArray<int>& a, int n, Drain drain) {
  compile(
      [drain](Int count, Ptr<Int> p) {
        Ptr<Int> q = p + index();
        gather(q);
        Int x;
        For (Int i = 0, i < count, i = i + 16)
          gather(q + 16);
          receive(x);
          store(x + x, q);
          q = q + 16;
        End
        receive(x);
        drain(x, p);
      },
      "prefetch")(n, &a);
}

}  // namespace

TEST_CASE("a vector gathered past the end may be discarded") {
  SharedArray<int> a(64);
  for (int i = 0; i < 64; ++i) a[i] = i;
  prefetching(a, 64, [](Int&, Ptr<Int>&) {});
  for (int i = 0; i < 64; ++i) CHECK(a[i] == 2 * i);
  prefetching(a, 64, [](Int& x, Ptr<Int>&) { x = 0; });
  // The vector is copied, but the copy is not used.
  prefetching(a, 64, [](Int& x, Ptr<Int>& p) {
    Int y = x;
    y = 1;
    *p = y;
  });
}

TEST_CASE("a vector gathered past the end must not be used") {
  SharedArray<int> a(64);
  const std::string text = thrown<qpu::BoundsError>([&a] {
    prefetching(a, 64, [](Int& x, Ptr<Int>& p) { *p = x + 1; });
  });
  CHECK(contains(text, "gather at"));
  CHECK(contains(text, test::onEmulator() ? "element 0 of a vector that was received and is used"
                                          : "element 0 of a vector that was received and used"));
  CHECK_THROWS_AS(prefetching(a, 64,
                              [](Int& x, Ptr<Int>& p) {
                                Int y = x;
                                store(y, p);
                              }),
                  qpu::BoundsError);
  CHECK_THROWS_AS(prefetching(a, 64,
                              [](Int& x, Ptr<Int>&) {
                                If (any(x > 0))
                                  x = 1;
                                End
                              }),
                  qpu::BoundsError);
}

TEST_CASE("the error for a gather names its first invalid element") {
  SharedArray<int> a(24), out(16);
  const std::string text = thrown<qpu::BoundsError>([&] {
    compile([](Ptr<Int> p, Ptr<Int> q) {
      gather(p + 16 + index());
      Int x;
      receive(x);
      *q = x;
    })(&a, &out);
  });
  CHECK(contains(text, "element 8 of a vector"));
}

TEST_CASE("gather errors that depend on data stop the run") {
  SharedArray<int> a(16);
  const auto k = compile(
      [](Int asked, Int taken, Ptr<Int> p) {
        For (Int i = 0, i < asked, i = i + 1)
          gather(p);
        End
        Int x;
        For (Int i = 0, i < taken, i = i + 1)
          receive(x);
        End
      },
      "counted");
  k(4, 4, &a);
  CHECK(contains(thrown<qpu::ExecutionError>([&] { k(5, 5, &a); }),
                 test::onEmulator() ? "a fifth request to TMU" : "a fifth gather"));
  CHECK(contains(thrown<qpu::ExecutionError>([&] { k(2, 3, &a); }),
                 test::onEmulator() ? "from a TMU without an outstanding request"
                                    : "no gather is outstanding"));
}

TEST_CASE("the QPU count must be 1..12") {
  auto k = compile([](Int) {}, "idle");
  CHECK(k.numQPUs() == 1);
  CHECK(contains(thrown<qpu::ArgumentError>([&] { k.setNumQPUs(0); }), "setNumQPUs(0)"));
  CHECK(contains(thrown<qpu::ArgumentError>([&] { k.setNumQPUs(13); }), "kernel 'idle'"));
  k.setNumQPUs(12);
  CHECK(k.numQPUs() == 12);
}

TEST_CASE("null and empty arrays are rejected as arguments") {
  const auto k = compile([](Ptr<Int> p) { *p = 1; });
  SharedArray<int> empty;
  CHECK_THROWS_AS(k(nullptr), qpu::ArgumentError);
  CHECK(contains(thrown<qpu::ArgumentError>([&] { k(&empty); }), "call alloc() first"));
}

namespace {

// A barrier. QPU 0 takes one token from each of the other QPUs and then returns the tokens.
void barrier() {
  If (any(me() == 0))
    For (Int i = 1, i < numQPUs(), i = i + 1)
      semaDec(0);
    End
    For (Int i = 1, i < numQPUs(), i = i + 1)
      semaInc(1);
    End
  Else
    semaInc(0);
    semaDec(1);
  End
}

}  // namespace

TEST_CASE("a barrier orders writes and reads of QPUs") {
  SharedArray<int> data(12 * 16), out(12 * 16);
  auto k = compile([](Ptr<Int> p, Ptr<Int> q) {
    p[me() << 4] = me() + 1;
    barrier();
    Int next = me() + 1;
    Where (next == numQPUs())
      next = 0;
    End
    q[me() << 4] = p[next << 4];
  });
  for (int n = 1; n <= 12; ++n) {
    std::fill(data.begin(), data.end(), 0);
    k.setNumQPUs(n);
    k(&data, &out);
    for (int q = 0; q < n; ++q) CHECK(out[16 * q] == (q + 1) % n + 1);
  }
}

// The test uses at most two QPUs. With more QPUs, a fast QPU could acquire the token of a slow QPU.
TEST_CASE("QPUs that wait at one place repeatedly do not deadlock") {
  SharedArray<int> out(16);
  auto k = compile([](Int rounds, Ptr<Int> q) {
    Int met = 0;
    For (Int i = 0, i < rounds, i = i + 1)
      barrier();
      met = met + 1;
    End
    If (any(me() == numQPUs() - 1))
      *q = met;
    End
  });
  for (const int n : {1, 2}) {
    k.setNumQPUs(n);
    k(5 + n, &out);
    CHECK(out[0] == 5 + n);
  }
}

TEST_CASE("the deadlock error lists each QPU and its semaphore") {
  auto k = compile(
      [] {
        If (any(me() == 1))
          semaDec(3);
        Else
          semaDec(4);
        End
      },
      "stuck");
  k.setNumQPUs(2);
  const std::string text = thrown<qpu::DeadlockError>([&] { k(); });
  CHECK(contains(text, "kernel 'stuck': deadlock"));
  const bool emulated = test::onEmulator();
  CHECK(contains(text, emulated ? "QPU 0 in instruction " : "QPU 0 in semaDec at"));
  CHECK(contains(text, "for semaphore 4, which is 0"));
  CHECK(contains(text, emulated ? "QPU 1 in instruction " : "QPU 1 in semaDec at"));
  CHECK(contains(text, "semaDec at"));
}

TEST_CASE("semaInc waits at 15") {
  auto k = compile([](Int surplus) {
    If (any(me() == 0))
      for (int i = 0; i < 15; ++i) semaInc(2);
      For (Int i = 0, i < surplus, i = i + 1)
        semaInc(2);
      End
    Else
      For (Int i = 0, i < surplus + 15, i = i + 1)
        semaDec(2);
      End
    End
  });
  CHECK_THROWS_AS(k(1), qpu::DeadlockError);
  k.setNumQPUs(2);
  CHECK_NOTHROW(k(5));
}

TEST_CASE("a semaphore must be 0 at the end") {
  CHECK(contains(thrown<qpu::ExecutionError>([] { compile([] { semaInc(5); })(); }),
                 "semaphore 5 is 1 at the end"));
}

TEST_CASE("a polling QPU does not starve the others") {
  SharedArray<int> flag(16), out(16);
  auto k = compile([](Ptr<Int> p, Ptr<Int> q) {
    If (any(me() == 0))
      Int polls = 0;
      While (any(*p == 0))
        polls = polls + 1;
      End
      *q = polls;
    Else
      *p = 1;
    End
  });
  k.setNumQPUs(2);
  // On hardware, a write that no semaphore orders may never become visible to a QPU.
  if (test::onEmulator()) {
    CHECK(contains(thrown<qpu::ExecutionError>([&] { k(&flag, &out); }),
                   "which might not have been written yet by QPU 1"));
    return;
  }
  k(&flag, &out);
  CHECK(out[0] == 1000);  // the documented number of loop iterations
}

TEST_CASE("repeated runs have the same result despite races") {
  const auto race = [] {
    SharedArray<int> a(16);
    auto k = compile([](Ptr<Int> p) {
      For (Int i = 0, i < 1500, i = i + 1)
        *p = *p * 3 + me();
      End
    });
    k.setNumQPUs(7);
    k(&a);
    return a[0];
  };
  if (test::onEmulator()) {
    CHECK(contains(thrown<qpu::ExecutionError>(race), "without being ordered after the write by"));
    return;
  }
  const int first = race();
  for (int i = 0; i < 3; ++i) CHECK(race() == first);
}

TEST_CASE("distributed work has the same result on 1 to 12 QPUs") {
  const int n = 16 * 41;
  std::vector<float> first;
  auto k = compile([](Int count, Ptr<Float> p, Ptr<Float> q) {
    For (Int i = me() << 4, i < count, i = i + (numQPUs() << 4))
      Float x = p[i];
      Float sum = 0;
      for (int j = 1; j < 6; ++j) sum = sum * x + rotate(x, j);
      q[i] = sum;
    End
  });
  for (int qpus = 1; qpus <= 12; ++qpus) {
    SharedArray<float> in(n), out(n);
    for (int i = 0; i < n; ++i) in[i] = 1.0F / static_cast<float>(i + 1);
    k.setNumQPUs(qpus);
    k(n, &in, &out);
    if (first.empty()) first.assign(out.begin(), out.end());
    CHECK(std::equal(first.begin(), first.end(), out.begin()));
  }
  CHECK(first[0] != first[1]);
}
