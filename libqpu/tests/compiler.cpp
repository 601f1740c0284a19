// Compares the results of compiled code on the emulator with those of the interpreter.
#include <cstdlib>
#include <iostream>
#include <stdexcept>

#include "compiler/compile.hpp"
#include "compiler/mir_text.hpp"
#include "fuzz/object.hpp"
#include "isa/access.hpp"
#include "isa/verify.hpp"
#include "lang/gathers.hpp"

// The following header is included last, because it defines the language's keywords as macros.
#include "tests/compiler_cases.hpp"

using fuzz::listing;

void execute(const qpu::detail::Source& source, const qpu::compiler::Options& options, int qpus,
             const std::vector<std::uint32_t>& arguments) {
  CHECK(check(select(source, options)) == "");
  const qpu::code::Object object = qpu::compiler::compile(source, options);
  if (std::getenv("COMPILER_VERBOSE") != nullptr)
    std::cout << "level " << options.level << " " << text(select(source, options))
              << listing(object);
  for (const qpu::isa::Fault& fault : qpu::isa::verify(object.words))
    FAIL(fault.rule << ": " << fault.text << "\n" << listing(object));
  try {
    CHECK(fuzz::emulate(object, qpus, arguments, 10'000'000).hostInterrupt);
  } catch (const qpu::Error& e) {
    FAIL(std::string(e.what()) << "\n" << listing(object) << text(select(source, options)));
  }
}

// With so few registers, values are spilled between the stores that the kernel itself contains.
TEST_CASE("spills between a kernel's own stores are correct") {
  SharedArray<int> in = cases::ints(512), out(16 * 24);
  const auto f = [](Ptr<Int> p, Ptr<Int> r) {
    std::array<Int, 20> v;
    for (int i = 0; i < 20; ++i) {
      gather(p + 16 * i + index());
      receive(v[static_cast<std::size_t>(i)]);
    }
    store(index(), r + 320);
    For (Int n = 0, n < 3, n = n + 1)
      for (Int& x : v) x = x * 3 + v[7];
      store(v[3] + n, r + 336 + (n << 4));
    End
    for (int i = 0; i < 20; ++i) store(v[static_cast<std::size_t>(i)], r + 16 * i);
  };
  const qpu::detail::Source source = test::trace(f);
  const cases::Words uniforms = {cases::word(&in), cases::word(&out)};
  qpu::interp::run(qpu::interp::lower(source), 1, uniforms.data(), uniforms.size());
  const cases::Words expected = cases::wordsOf(out);
  for (int level = 0; level <= 2; ++level) {
    CAPTURE(level);
    std::fill(out.begin(), out.end(), 0);
    qpu::compiler::Options options;
    options.level = level;
    options.fileRegisters = 6;
    CHECK(qpu::compiler::compile(source, options).spillBytes > 0);
    execute(source, options, 1, uniforms);
    CHECK(cases::wordsOf(out) == expected);
  }
}

TEST_CASE("rematerialisation requires operands that are alive") {
  constexpr int live = 34;
  constexpr int spread = 2048;
  SharedArray<int> in = cases::ints(1024), out(3 * spread);
  // x is last used in the loop, but `half` is also used after the loop.
  const auto f = [](Int n, Float x, Ptr<Int> p, Ptr<Int> q) {
    std::vector<Int> v;
    v.reserve(live);
    Ptr<Int> to = q + me() * spread;
    for (int i = 0; i < live; ++i) v.emplace_back(p[me() * 5 + i * 16]);
    Float half = FloatExpr(0) + x * 0.5F, size;
    Int count = n;
    While (qpu::any(count > 0))
      count = count - 1;
      size = abs(x);
    End
    for (int i = 0; i < live; ++i) store(v[static_cast<std::size_t>(i)], to + 16 * i);
    store(asInt(half), to + 16 * live);
    store(asInt(size), to + 16 * (live + 1));
  };
  cases::sameOn({1, 3}, out, f, 3, -8.0F, &in, &out);
  const qpu::detail::Source source = test::trace(f);
  execute(source, {}, 1, {3, cases::word(-8.0F), cases::word(&in), cases::word(&out)});
  CHECK(out[16 * live] == static_cast<int>(cases::word(-4.0F)));
  CHECK(out[16 * (live + 1)] == static_cast<int>(cases::word(8.0F)));
}

// Each of these phases needs more vectors than there are registers.
TEST_CASE("spilled vectors with disjoint live ranges share memory") {
  constexpr int count = 120;
  SharedArray<int> in = cases::ints(16 * count), out(12 * 16 * 4);
  const auto phases = [](int number) {
    return test::trace([number](Ptr<Int> p, Ptr<Int> q) {
      for (int phase = 0; phase < number; ++phase) {
        std::vector<Int> v;
        v.reserve(count);
        for (int i = 0; i < count; ++i) v.emplace_back(p[16 * i] + phase);
        Int sum = me();
        for (const Int& x : v) sum = (sum * 3) ^ x;
        for (auto x = v.rbegin(); x != v.rend(); ++x) sum = (sum * 5) ^ *x;
        store(sum, q + 64 * me() + 16 * phase);
      }
    });
  };
  const cases::Words uniforms = {cases::word(&in), cases::word(&out)};
  for (const int level : {0, 2}) {
    CAPTURE(level);
    qpu::compiler::Options options;
    options.level = level;
    const std::uint32_t once = qpu::compiler::compile(phases(1), options).spillBytes;
    const qpu::detail::Source source = phases(4);
    CHECK(once > 64 * 50);
    CHECK(qpu::compiler::compile(source, options).spillBytes < once + once / 4);
    for (const int qpus : {1, 12}) {
      std::fill(out.begin(), out.end(), 0);
      qpu::interp::run(qpu::interp::lower(source), qpus, uniforms.data(), uniforms.size());
      const cases::Words expected = cases::wordsOf(out);
      std::fill(out.begin(), out.end(), 0);
      execute(source, options, qpus, uniforms);
      CHECK(cases::wordsOf(out) == expected);
    }
  }
}

namespace {

// Returns the number of DMA stores in the machine code.
int storeStarts(const qpu::code::Object& object) {
  int count = 0;
  for (const qpu::isa::Word w : object.words)
    count += (qpu::isa::accessOf(*qpu::isa::decode(w)).vpm & qpu::isa::kStoreStart) != 0 ? 1 : 0;
  return count;
}

// Returns the starts of DMA transfers in the machine code and the waits for them, in order.
std::string transfersOf(const qpu::code::Object& object) {
  std::string all;
  for (const qpu::isa::Word w : object.words) {
    const std::uint16_t vpm = qpu::isa::accessOf(*qpu::isa::decode(w)).vpm;
    if ((vpm & qpu::isa::kLoadStart) != 0) all += "load ";
    if ((vpm & qpu::isa::kStoreStart) != 0) all += "store ";
    if ((vpm & (qpu::isa::kLoadWait | qpu::isa::kStoreWait)) != 0) all += "wait ";
  }
  return all;
}

// Checks that the kernel's results at all levels equal those of the interpreter. Returns the
// numbers of DMA stores in the form "number at level 0 -> number at levels 1 and 2".
template <typename F>
std::string storesOf(F f, const std::vector<int>& qpuCounts = {1, 5, 12}) {
  SharedArray<int> in = cases::ints(16 * 64), out(16 * 64 * 12);
  const qpu::detail::Source source = test::trace(f);
  const cases::Words uniforms = {cases::word(&in), cases::word(&out), 3U};
  int plain = 0;
  int merged = 0;
  for (const int qpus : qpuCounts) {
    CAPTURE(qpus);
    std::fill(out.begin(), out.end(), 7);
    qpu::interp::run(qpu::interp::lower(source), qpus, uniforms.data(), uniforms.size());
    const cases::Words expected = cases::wordsOf(out);
    for (int level = 0; level <= 2; ++level) {
      CAPTURE(level);
      qpu::compiler::Options options;
      options.level = level;
      std::fill(out.begin(), out.end(), 7);
      execute(source, options, qpus, uniforms);
      CHECK(cases::wordsOf(out) == expected);
      const int found = storeStarts(qpu::compiler::compile(source, options));
      if (level == 0)
        plain = found;
      else
        merged = std::max(merged, found);
    }
  }
  return std::to_string(plain) + " -> " + std::to_string(merged);
}

}  // namespace

TEST_CASE("stores to adjacent addresses become one DMA transfer") {
  CHECK(storesOf([](Ptr<Int>, Ptr<Int> q, Int n) {
          Ptr<Int> to = q + 1024 * me();
          store(index(), to);
          store(index() * n, to + 16);
          to[32] = n;
          to[48] = n + 1;
          to[64] = n + 2;  // this is the fifth store
          to[80] = n + 3;
        }) == "6 -> 2");
  CHECK(storesOf([](Ptr<Int>, Ptr<Int> q, Int n) {
          For (Int i = 0, i < n, i = i + 1)
            Ptr<Int> to = q + (i << 5) + 1024 * me();
            store(i, to);
            store(index() + i, to + 16);
          End
        }) == "2 -> 1");
  // The index is scaled, and there are receives between the stores.
  CHECK(storesOf([](Ptr<Int> p, Ptr<Int> q, Int n) {
          Int x, y;
          Ptr<Int> from = p + index();
          gather(from);
          For (Int i = 0, i < n * 32, i = i + 32)
            gather(from + (i + 16));
            receive(x);
            q[me() * 1024 + i] = x + n;
            gather(from + (i + 32));
            receive(y);
            q[me() * 1024 + i + 16] = y - n;
          End
          receive(x);
        }) == "2 -> 2");  // because there is a gather between the stores
  CHECK(storesOf([](Ptr<Int> p, Ptr<Int> q, Int n) {
          Int x, y;
          Ptr<Int> from = p + index();
          For (Int i = 0, i < n * 32, i = i + 32)
            gather(from + i);
            gather(from + (i + 16));
            receive(x);
            q[me() * 1024 + i] = x + n;
            receive(y);
            Int z = y * 3;
            q[me() * 1024 + (i + 16)] = z - n;
          End
        }) == "2 -> 1");
}

TEST_CASE("with loads through the VPM, stores merge in pairs") {
  CHECK(storesOf([](Ptr<Int> p, Ptr<Int> q, Int n) {
          For (Int i = 0, i < n, i = i + 1)
            Int x = p[i << 4] + n;
            Ptr<Int> to = q + (i << 6) + 1024 * me();
            for (int k = 0; k < 4; ++k) store(x * (k + 1), to + 16 * k);
            Int y = to[16];
            store(y + x, q + 1000 + 1024 * me());
          End
        }) == "5 -> 3");
}

TEST_CASE("stores keep their order where it is observable") {
  // The addresses are not adjacent, or are not known to be adjacent.
  CHECK(storesOf([](Ptr<Int>, Ptr<Int> q, Int n) {
          Ptr<Int> to = q + 1024 * me();
          store(n, to + 16);
          store(n, to);
          store(n + 1, to + 8);
          store(n + 2, to + 40);
          store(n + 3, to + 40 + n);
        }) == "5 -> 5");
  // The second store depends on memory to which the first store writes.
  CHECK(storesOf([](Ptr<Int>, Ptr<Int> q, Int n) {
          Ptr<Int> to = q + 1024 * me();
          store(index() + n, to);
          store(to[0] + 1, to + 16);
          store(*(to + 16) + 1, to + 32);
        }) == "3 -> 3");
  CHECK(storesOf([](Ptr<Int>, Ptr<Int> q, Int n) {
          Ptr<Int> to = q + 1024 * me();
          store(index() + n, to);
          Int x = to[0];
          store(x, to + 16);
          If (any(x > 3))
            store(x, to + 32);
          Else
            store(x + 1, to + 32);
          End
          store(x, to + 48);
        }) == "5 -> 5");
  // The first store has fewer than 16 words, and it may overlap the second store.
  CHECK(storesOf([](Ptr<Int>, Ptr<Int> q, Int n) {
          Ptr<Int> to = q + 1024 * me();
          store(n, to);
          store(n + 1, to + 16, 5);
          store(n + 2, to + 32);
          store(n + 3, to + 48);
        }) == "4 -> 3");
  // Between the two stores, a semaphore signals another QPU.
  CHECK(storesOf([](Ptr<Int>, Ptr<Int> q, Int n) {
          Ptr<Int> to = q + 1024 * me();
          store(n, to);
          semaInc(3);
          store(n + 1, to + 16);
          semaDec(3);
          store(n + 2, to + 32);
          store(n + 3, to + 48);
        }) == "4 -> 3");
}

TEST_CASE("a store starts after the wait for an earlier load") {
  // The second load waits for the result of the first load. The second store does not depend on
  // either load.
  const auto f = [](Ptr<Int>, Ptr<Int> q, Int n) {
    Ptr<Int> to = q + 1024 * me();
    store(index(), to);
    Int first = to[0];
    Int second = to[first >> 4];  // the address is `to`
    store(n, to);
    store(second, to + 32);
  };
  CHECK(storesOf(f) == "3 -> 3");
  for (int level = 0; level <= 2; ++level) {
    CAPTURE(level);
    qpu::compiler::Options options;
    options.level = level;
    CHECK(transfersOf(qpu::compiler::compile(test::trace(f), options)) ==
          "store wait load wait load wait store wait store wait ");
  }
}

TEST_CASE("stores are not merged where vectors are spilled") {
  constexpr int count = 120;
  const auto f = [](Ptr<Int> p, Ptr<Int> q, Int n) {
    std::vector<Int> v;
    v.reserve(count);
    for (int i = 0; i < count; ++i) v.emplace_back(p[8 * i] + n);
    for (int i = 0; i < count; ++i) v[static_cast<std::size_t>(i)] =
        v[static_cast<std::size_t>(i)] * 3 + v[static_cast<std::size_t>((i * 7 + 1) % count)];
    Int sum = 0;
    for (const Int& x : v) sum = (sum * 3) ^ x;
    for (auto x = v.rbegin(); x != v.rend(); ++x) sum = (sum * 5) ^ *x;
    Ptr<Int> to = q + 1024 * me();
    store(sum, to);
    store(v[0], to + 16);
    store(v[1], to + 32);
  };
  const qpu::code::Object object = qpu::compiler::compile(test::trace(f));
  CHECK(object.spillBytes > 0);
  CHECK(storeStarts(object) > 3);  // the number includes the stores of spill code
  (void)storesOf(f, {1, 3});
}

TEST_CASE("gathers outstanding on some paths are received at the end") {
  CHECK(storesOf([](Ptr<Int> p, Ptr<Int> q, Int n) {
          gather(p);
          gather(p + 16);
          If (any(index() + me() < n))
            gather(p + 32);
          End
          store(n, q + 1024 * me());
        }) == "1 -> 1");
  // A kernel whose gathers depend on the path uses a single TMU, which can hold four requests.
  const auto five = [](Ptr<Int> p, Int n) {
    for (int i = 0; i < 5; ++i) gather(p + 16 * i);
    Int x;
    for (int i = 0; i < 4; ++i) receive(x);
    If (any(x < n))
      receive(x);
    End
  };
  CHECK_THROWS_AS(qpu::detail::checkGathers(test::trace(five)), qpu::CompileError);
}
