// Tests SharedArray: ownership, addresses, copies, errors and threads.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/run.hpp"

using test::contains;
using test::thrown;

TEST_CASE("a new array is zero and aligned to 64 bytes") {
  for (const std::size_t n : {1U, 15U, 16U, 17U, 100000U}) {
    SharedArray<float> a(n);
    CHECK(a.size() == n);
    CHECK(a.getAddress() % 64 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(a.getPointer()) % 64 == 0);
    CHECK(std::all_of(a.begin(), a.end(), [](float x) { return x == 0.0F; }));
  }
}

TEST_CASE("moving an array transfers its memory") {
  SharedArray<int> a(16);
  a[3] = 7;
  const std::uint32_t address = a.getAddress();
  SharedArray<int> b(std::move(a));
  CHECK(b.getAddress() == address);
  CHECK(b[3] == 7);
  SharedArray<int> c(8);
  c = std::move(b);
  CHECK(c.size() == 16);
  CHECK(c[3] == 7);
  std::vector<SharedArray<int>> many;
  many.push_back(std::move(c));
  many.emplace_back(4);
  CHECK(many.front().getAddress() == address);
}

TEST_CASE("an array without memory can be assigned to") {
  SharedArray<int> a;
  CHECK(a.size() == 0);
  CHECK(a.getAddress() == 0);
  CHECK_THROWS_AS(a[0], qpu::ArgumentError);
  a.alloc(16);
  a[15] = 1;
  a.alloc(32);
  CHECK(a.size() == 32);
  a.dealloc();
  CHECK(a.size() == 0);
}

TEST_CASE("invalid lengths are rejected") {
  CHECK(contains(thrown<qpu::AllocationError>([] { SharedArray<int> a(0); }),
                 "SharedArray of 0 elements"));
  CHECK(contains(thrown<qpu::AllocationError>([] { SharedArray<int> a(1U << 28U); }),
                 "1 GB of bus addresses"));
  CHECK_THROWS_AS(SharedArray<int>(static_cast<std::size_t>(-1)), qpu::AllocationError);
}

TEST_CASE("running out of bus addresses is a recoverable error") {
  // The bus address space is the limit, because the host provides no memory for pages that have
  // not been accessed.
  const std::size_t big = 32U << 20U;
  std::vector<SharedArray<int>> hold;
  const std::string text = thrown<qpu::AllocationError>([&] {
    for (int i = 0; i < 20; ++i) hold.emplace_back(big);
  });
  CHECK(hold.size() == 7);
  CHECK(contains(text, "live arrays in 1 GB of bus addresses; release some"));
  hold.clear();
  CHECK_NOTHROW(SharedArray<int>{big});
}

TEST_CASE("unused arrays are released before an allocation fails") {
  constexpr std::size_t big = 32U << 20U;
  constexpr int most = 7;  // arrays for which there are bus addresses
  static std::vector<SharedArray<int>> unused;
  static bool allocates = false;
  static int calls = 0;
  qpu::onAllocationFailure([] {
    ++calls;
    // The function must not be called recursively.
    if (allocates) CHECK_THROWS_AS(SharedArray<int>{big}, qpu::AllocationError);
    unused.clear();
  });
  for (const bool nested : {false, true}) {
    allocates = nested;
    for (int i = 0; i < most; ++i) unused.emplace_back(big);
    CHECK_NOTHROW(SharedArray<int>{big});
    CHECK(unused.empty());
  }
  CHECK(calls == 2);
  allocates = false;
  std::vector<SharedArray<int>> used;
  for (int i = 0; i < most; ++i) used.emplace_back(big);
  CHECK_THROWS_AS(SharedArray<int>{big}, qpu::AllocationError);
  CHECK(calls == 3);
  CHECK_THROWS_AS(SharedArray<int>{0}, qpu::AllocationError);
  CHECK(calls == 3);
}

TEST_CASE("accessing elements outside of an array is an error") {
  SharedArray<int> a(16);
  CHECK(contains(thrown<qpu::ArgumentError>([&] { a[16] = 1; }),
                 "element 16 is not inside the array of 16 elements"));
  CHECK_THROWS_AS(a[-1], qpu::ArgumentError);
  const SharedArray<int>& constant = a;
  CHECK_THROWS_AS(constant[99], qpu::ArgumentError);
}

TEST_CASE("block copies are checked") {
  SharedArray<int> a(10);
  const std::vector<int> source = {1, 2, 3, 4};
  a.copyFrom(source.data(), 4);
  a.copyFrom(source.data(), 2, 8);
  std::vector<int> back(10);
  a.copyTo(back.data(), 10);
  CHECK(back == std::vector<int>{1, 2, 3, 4, 0, 0, 0, 0, 1, 2});
  a.copyTo(back.data(), 2, 1);
  CHECK(back[0] == 2);
  a.copyFrom(nullptr, 0, 10);
  CHECK_THROWS_AS(a.copyFrom(source.data(), 4, 7), qpu::ArgumentError);
  CHECK_THROWS_AS(a.copyTo(back.data(), 1, 10), qpu::ArgumentError);
  CHECK_THROWS_AS(a.copyTo(back.data(), static_cast<std::size_t>(-1), 2), qpu::ArgumentError);
}

TEST_CASE("an array of pointers holds 32-bit bus addresses") {
  SharedArray<float> a(16);
  SharedArray<float*> p(4);
  CHECK(sizeof(p[0]) == 4);
  CHECK(static_cast<float*>(p[0]) == nullptr);
  p[0] = a.getPointer() + 5;
  CHECK(p[0].address() == a.getAddress() + 20);
  CHECK(static_cast<float*>(p[0]) == a.getPointer() + 5);
  p[1] = p[0];
  CHECK(p[1].address() == p[0].address());
  p[2] = a.getPointer() + 16;  // C++ allows a pointer one past the end of an array
  CHECK(p[2].address() == a.getAddress() + 64);
  p[3] = nullptr;
  CHECK(p[3].address() == 0);
  CHECK_THROWS_AS(a.pointer(16), qpu::ArgumentError);
}

TEST_CASE("a pointer outside of shared memory is rejected") {
  SharedArray<float*> p(1);
  float local = 0;
  CHECK(contains(thrown<qpu::ArgumentError>([&] { p[0] = &local; }),
                 "only pointers into live SharedArrays"));
  p[0] = qpu::BusPointer<float>::fromAddress(0x1234);
  CHECK(contains(thrown<qpu::ArgumentError>([&] { (void)static_cast<float*>(p[0]); }),
                 "0x00001234 is not in a live SharedArray"));
}

TEST_CASE("a bus address cast to a pointer is accepted") {
  SharedArray<int> a(16);
  SharedArray<int*> p(1);
  p[0] = reinterpret_cast<int*>(static_cast<std::uintptr_t>(a.getAddress() + 8));
  CHECK(static_cast<int*>(p[0]) == a.getPointer() + 2);
}

TEST_CASE("threads can allocate, compile and run concurrently") {
  const auto shared = compile([](Int n, Ptr<Int> p) {
    For (Int i = me() << 4, i < n, i = i + (numQPUs() << 4))
      p[i] = i + index();
    End
  });
  std::atomic<int> wrong{0};
  const auto work = [&](int seed) {
    for (int round = 0; round < 40; ++round) {
      const int n = 16 * (1 + (seed * 7 + round) % 30);
      SharedArray<int> a(static_cast<std::size_t>(n)), b(16);
      auto k = shared;
      k.setNumQPUs(1 + round % 12);
      k(n, &a);
      const auto own = compile([seed](Ptr<Int> p) { *p = seed; });
      own(&b);
      std::vector<int> expected(static_cast<std::size_t>(n));
      std::iota(expected.begin(), expected.end(), 0);
      if (!std::equal(expected.begin(), expected.end(), a.begin()) || b[7] != seed) ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (int seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& t : threads) t.join();
  CHECK(wrong == 0);
}

TEST_CASE("releasing an array does not affect a running kernel") {
  std::atomic<bool> stop{false};
  std::thread churn([&stop] {
    while (!stop) SharedArray<int> a(1000);
  });
  SharedArray<int> a(16);
  const auto k = compile([](Ptr<Int> p) {
    For (Int i = 0, i < 2000, i = i + 1)
      *p = *p + 1;
    End
  });
  for (int i = 0; i < 20; ++i) k(&a);
  stop = true;
  churn.join();
  CHECK(a[0] == 20 * 2000);
}
