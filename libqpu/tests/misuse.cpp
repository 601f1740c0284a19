// Tests errors in a kernel's source. The CompileError must name the kernel and the construct.
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/run.hpp"

using test::contains;
using test::thrown;

namespace {

// Returns the error message for a kernel that is named "bad" and has no parameters.
template <typename F>
std::string refused(F f) {
  return thrown<qpu::CompileError>([f] { compile(f, "bad"); });
}

}  // namespace

TEST_CASE("Else requires an open If or Where") {
  const std::string text = refused([] { qpu::Else_(); });
  CHECK(contains(text, "kernel 'bad'"));
  CHECK(contains(text, "Else at"));
  CHECK(contains(text, "misuse.cpp:"));
  CHECK(contains(text, "no If or Where is open"));
}

TEST_CASE("Else in a While is an error") {
  const std::string text = refused([] {
    Int x = 0;
    While (any(x < 3))
      x = x + 1;
    Else
      x = x - 1;
    End
  });
  CHECK(contains(text, "Else at"));
  CHECK(contains(text, "belongs to While at"));
}

TEST_CASE("two Elses of one If are an error") {
  const std::string text = refused([] {
    Int x = 0;
    If (any(x < 3))
      x = 1;
    Else
      x = 2;
    Else
      x = 3;
    End
  });
  CHECK(contains(text, "already has an Else"));
}

TEST_CASE("an expression that is nested too deeply is an error") {
  const auto nested = [](int operations) {
    return [operations](Ptr<Int> p) {
      qpu::IntExpr sum = qpu::index();
      for (int i = 0; i < operations; ++i) sum = sum + *p;
      *p = sum;
    };
  };
  CHECK_NOTHROW(compile(nested(9000), "bad"));
  const std::string text = refused([] {
    qpu::IntExpr sum = qpu::index();
    for (int i = 0; i < 200'000; ++i) sum = sum + i;
  });
  CHECK(contains(text, "kernel 'bad'"));
  CHECK(contains(text, "more than 10000 operations are nested in an expression; assign parts of the expression"));
}

TEST_CASE("End without an open block is an error") {
  CHECK(contains(refused([] { qpu::End_(); }), "no If, While, For or Where is open"));
  CHECK(contains(refused([] {
                   Int x = 0;
                   If (any(x < 3))
                     x = 1;
                   End
                   qpu::End_();
                 }),
                 "End at"));
}

TEST_CASE("a block without End is an error") {
  const std::string text = refused([] {
    Int x = 0;
    qpu::While_(x < 3);
    x = x + 1;
  });
  CHECK(contains(text, "While at"));
  CHECK(contains(text, "has no End"));
}

TEST_CASE("For requires all its parts") {
  CHECK(contains(refused([] {
                   Int x = 0;
                   qpu::For_(x < 3);
                   qpu::End_();
                 }),
                 "has no body"));
  CHECK(contains(refused([] { qpu::ForBody_(); }), "no open For that still needs a body"));
}

TEST_CASE("receive without gather is an error") {
  const std::string text = refused([] {
    Int x;
    receive(x);
  });
  CHECK(contains(text, "receive at"));
  CHECK(contains(text, "no gather is outstanding"));
}

TEST_CASE("receive without gather on any path is an error") {
  CHECK(contains(thrown<qpu::CompileError>([] {
                   compile(
                       [](Int n, Ptr<Int> p) {
                         If (any(n > 0))
                           gather(p);
                         Else
                           gather(p + 1);
                         End
                         Int x;
                         receive(x);
                         receive(x);
                       },
                       "twice");
                 }),
                 "kernel 'twice'"));
  CHECK(contains(thrown<qpu::CompileError>([] {
                   compile([](Int n) {
                     While (any(n > 0))
                       Int x;
                       receive(x);
                     End
                   });
                 }),
                 "no gather is outstanding"));
}

TEST_CASE("a ninth outstanding gather is an error") {
  const auto many = [](int n) {
    return [n](Ptr<Int> p) {
      for (int i = 0; i < n; ++i) gather(p + i);
      Int x;
      for (int i = 0; i < n; ++i) receive(x);
      *p = x;
    };
  };
  CHECK_NOTHROW(compile(many(8)));
  const std::string text = thrown<qpu::CompileError>([many] { compile(many(9), "nine"); });
  CHECK(contains(text, "kernel 'nine', ") == false);
  CHECK(contains(text, "kernel 'nine': gather at"));
  CHECK(contains(text, "8 gathers are already outstanding"));
}

TEST_CASE("a fifth gather is an error if TMUs cannot alternate") {
  // The paths have different numbers of gathers, so later gathers cannot be assigned to a TMU.
  const auto uneven = [](int n) {
    return [n](Int some, Ptr<Int> p) {
      Int x;
      gather(p);
      If (some > 0)
        gather(p);
      End
      receive(x);
      for (int i = 0; i < n; ++i) gather(p + i);
      for (int i = 0; i < n; ++i) receive(x);
      If (some > 0)
        receive(x);
      End
    };
  };
  CHECK_NOTHROW(compile(uneven(3)));
  CHECK(contains(thrown<qpu::CompileError>([uneven] { compile(uneven(5)); }),
                 "4 gathers are already outstanding"));
  // The load requires one of the TMUs, so the gathers can use only the other TMU.
  const auto withLoad = [](int n) {
    return [n](Ptr<Int> p) {
      for (int i = 0; i < n; ++i) gather(p + i);
      Int x = *p;
      for (int i = 0; i < n; ++i) receive(x);
    };
  };
  CHECK_NOTHROW(compile(withLoad(4)));
  CHECK(contains(thrown<qpu::CompileError>([withLoad] { compile(withLoad(5)); }),
                 "4 gathers are already outstanding"));
}

TEST_CASE("a loop may keep eight gathers in flight") {
  CHECK_NOTHROW(compile([](Int n, Ptr<Int> p) {
    Int x;
    for (int i = 0; i < 6; ++i) gather(p + 16 * i);
    For (Int i = 0, i < n, i = i + 32)
      gather(p + i);
      gather(p + i + 16);
      receive(x);
      receive(x);
    End
    for (int i = 0; i < 6; ++i) receive(x);
  }));
}

TEST_CASE("data-dependent gather errors are left to the run") {
  CHECK_NOTHROW(compile([](Int n, Ptr<Int> p) {
    For (Int i = 0, i < n, i = i + 1)
      gather(p);
    End
    Int x;
    For (Int i = 0, i < n, i = i + 1)
      receive(x);
    End
    *p = x;
  }));
}

TEST_CASE("receiving a type other than the gathered one is an error") {
  const std::string text = thrown<qpu::CompileError>([] {
    compile([](Ptr<Int> p) {
      gather(p);
      Float x;
      receive(x);
    });
  });
  CHECK(contains(text, "the oldest gather delivers Int, but the variable is Float"));
}

TEST_CASE("stores, gathers and loops inside Where are errors") {
  const auto inside = [](auto body) {
    return thrown<qpu::CompileError>([body] {
      compile([body](Ptr<Int> p) {
        Int x = index();
        Where (x < 3)
          body(x, p);
        End
      });
    });
  };
  CHECK(contains(inside([](Int& x, Ptr<Int>& p) { *p = x; }), "not allowed inside Where"));
  CHECK(contains(inside([](Int& x, Ptr<Int>& p) { store(x, p); }), "store at"));
  CHECK(contains(inside([](Int& x, Ptr<Int>& p) { store(x, p, 4); }), "store at"));
  CHECK(contains(inside([](Int&, Ptr<Int>& p) { gather(p); }), "gather at"));
  CHECK(contains(inside([](Int& x, Ptr<Int>&) { vpmPut(x); }), "vpmPut at"));
  CHECK(contains(inside([](Int& x, Ptr<Int>&) {
                   While (any(x < 3))
                     x = x + 1;
                   End
                 }),
                 "the loop might never end"));
}

TEST_CASE("numbers out of the hardware's range are errors") {
  CHECK(contains(refused([] { semaInc(16); }), "the semaphore is 16, but must be 0..15"));
  CHECK(contains(refused([] { semaDec(-1); }), "semaDec at"));
  CHECK(contains(refused([] { dmaSetupRead(HORIZ, 17, 0); }), "rows is 17, but must be 1..16"));
  CHECK(contains(refused([] { dmaSetupRead(HORIZ, 1, 0, 17); }), "row length is 17"));
  CHECK(contains(refused([] { dmaSetupRead(HORIZ, 1, 0, 16, 0); }), "VPM pitch is 0"));
  CHECK(contains(refused([] { dmaSetupWrite(HORIZ, 65, 0); }), "rows is 65, but must be 1..64"));
  CHECK(contains(refused([] { dmaSetupWrite(VERT, 17, 0); }), "rows is 17, but must be 1..16"));
  CHECK(contains(refused([] { vpmSetupRead(HORIZ, 0, 0); }), "vectors is 0, but must be 1..16"));
  CHECK(contains(refused([] { vpmSetupWrite(HORIZ, 0, 65); }), "stride is 65, but must be 1..64"));
}

TEST_CASE("constant VPM places out of range are errors") {
  CHECK(contains(refused([] { vpmSetupWrite(HORIZ, 256); }),
                 "kernel 'bad': vpmSetupWrite at"));
  CHECK(contains(refused([] { vpmSetupWrite(HORIZ, 256); }),
                 "the vector address is 256, but must be 0..63"));
  CHECK(contains(refused([] { vpmSetupRead(VERT, 1, -1); }), "the vector address is -1"));
  CHECK(contains(refused([] { vpmSetupRead(VERT, 1, IntExpr(60) + 4); }),
                 "the vector address is 64"));
  CHECK(contains(refused([] { dmaSetupRead(HORIZ, 2, 63 * 16); }),
                 "2 rows by 16 columns from VPM word 1008 exceed the window"));
  CHECK(contains(refused([] { dmaSetupRead(HORIZ, 1, 8); }), "exceed the window"));
  CHECK(contains(refused([] { dmaSetupRead(VERT, 4, 7, 16, 17); }), "VPM pitch is 17"));
  CHECK(contains(refused([] { dmaSetupRead(VERT, 5, 7, 16, 16); }),
                 "80 rows by 1 columns from VPM word 7"));
  CHECK_NOTHROW(compile([](Ptr<Int>) { dmaSetupRead(VERT, 3, 15, 16, 5); }));
  CHECK(contains(refused([] { dmaSetupWrite(HORIZ, 1, -1); }),
                 "the VPM address is -1, but must be 0..1023"));
  CHECK(contains(refused([] { dmaSetupWrite(VERT, 16, 16, 64); }), "64 rows by 16 columns"));
  CHECK(contains(refused([] { dmaSetReadPitch(8192); }),
                 "the distance in bytes is 8192, but must be 0..8191"));
  CHECK(contains(refused([] { dmaSetWriteStride(-4); }), "dmaSetWriteStride at"));
  // The check also applies to code that is never executed.
  CHECK(contains(refused([] {
                   If (me() == 12)
                     vpmSetupWrite(HORIZ, 256);
                   End
                 }),
                 "vpmSetupWrite at"));
  CHECK_NOTHROW(compile([](Ptr<Int> p) {
    vpmSetupWrite(HORIZ, 63);
    vpmPut(1);
    dmaSetReadPitch(8191);
    dmaSetupRead(HORIZ, 4, 0, 16, 16);
    dmaSetupWrite(VERT, 16, 0, 64);
    dmaSetupWrite(HORIZ, 64, 0);
    (void)p;
  }));
}

TEST_CASE("over 64 VPM reads in an expression are an error") {
  const auto doubled = [](int times) {
    vpmSetupRead(HORIZ, 16, 0);
    vpmSetupWrite(HORIZ, 0);
    std::vector<IntExpr> sums{vpmGetInt()};
    for (int i = 0; i < times; ++i) sums.push_back(sums.back() + sums.back());
    vpmPut(sums.back());
  };
  (void)compile([&](Ptr<Int>) { doubled(6); });
  CHECK(contains(refused([&] { doubled(7); }), "an expression reads 128 vectors, but the VPM has 64"));
}

TEST_CASE("numbers that do not fit in an Int are errors") {
  CHECK(contains(refused([] { (void)IntExpr(3e9 * 2); }),
                 "the number 6000000000 does not fit into an Int, whose range is -2147483648..4294967295"));
  CHECK(contains(refused([] { (void)IntExpr(3e9 * 2); }), "kernel 'bad': Int"));
  CHECK(contains(refused([] { (void)IntExpr(-2147483649.0); }), "-2147483649"));
  CHECK(contains(refused([] { (void)IntExpr(std::nan("")); }), "nan"));
  CHECK(contains(refused([] { (void)(index() + HUGE_VALF); }), "inf"));
  CHECK(contains(refused([] { (void)IntExpr(std::int64_t{1} << 40); }), "1.099511628e+12"));
  CHECK(contains(refused([] { (void)IntExpr(UINT64_MAX); }), "does not fit into an Int"));
  SharedArray<int> out(16 * 6);
  compile([](Ptr<Int> p) {
    p[0] = -2147483648.9;
    p[16] = 4294967295.0;
    p[32] = -2.9F;
    p[48] = 0xffff0000U;
    p[64] = std::int64_t{-5};
    p[80] = 1e-300;
  })(&out);
  CHECK(out[0] == INT32_MIN);
  CHECK(out[16] == -1);
  CHECK(out[32] == -2);
  CHECK(out[48] == -65536);
  CHECK(out[64] == -5);
  CHECK(out[80] == 0);
}

TEST_CASE("a caught error makes the kernel invalid") {
  const auto caught = [](auto f) {
    return refused([f] {
      Int x = 0;
      try {
        f(x);
      } catch (const qpu::CompileError&) {
      }
      x = x + 1;
    });
  };
  CHECK(contains(caught([](Int&) { semaInc(16); }), "the semaphore is 16, but must be 0..15"));
  CHECK(contains(caught([](Int&) { qpu::Else_(); }), "no If or Where is open"));
  CHECK(contains(caught([](Int&) { dmaSetupRead(HORIZ, 1, 8); }), "exceed the window"));
  CHECK(contains(caught([](Int& x) { x = broadcast(x, 16); }), "broadcast at"));
  Int* kept = nullptr;
  compile([&kept](Int) { kept = new Int(1); });
  CHECK(contains(caught([kept](Int& x) { x = *kept; }), "a vector of another kernel"));
  delete kept;
  // The outer kernel, in which the invalid kernel is compiled, is valid.
  CHECK_NOTHROW(compile([](Ptr<Int> p) {
    (void)refused([] { semaInc(16); });
    *p = 1;
  }));
}

TEST_CASE("a broadcast of an invalid element is an error") {
  const std::string text = refused([] { (void)broadcast(toFloat(index()), 16); });
  CHECK(contains(text, "kernel 'bad': broadcast at"));
  CHECK(contains(text, "the element is 16, but must be 0..15"));
  CHECK(contains(refused([] { (void)broadcast(index(), -1); }), "the element is -1"));
}

TEST_CASE("a store of 0 or over 16 words is an error") {
  const auto storing = [](int n) {
    return thrown<qpu::CompileError>(
        [n] { compile([n](Ptr<Int> p) { store(index(), p, n); }, "some"); });
  };
  CHECK(contains(storing(0), "kernel 'some': store at"));
  CHECK(contains(storing(0), "the number of words is 0, but must be 1..16"));
  CHECK(contains(storing(17), "is 17"));
  const auto k = compile([](Ptr<Int> p, Int n) { store(index(), p, n); }, "some");
  SharedArray<int> a(32);
  for (const int n : {0, -1, 17, 1 << 30})
    CHECK(contains(thrown<qpu::ExecutionError>([&] { k(&a, n); }),
                   "the number of words is " + std::to_string(n) + ", but must be 1..16"));
  CHECK(a[0] == 0);
}

TEST_CASE("using vectors outside compile() is an error") {
  const std::string text = thrown<qpu::CompileError>([] { Int x; });
  CHECK(contains(text, "only inside a function that compile() runs"));
}

TEST_CASE("using another kernel's vector is an error") {
  Int* kept = nullptr;
  compile([&kept](Int) { kept = new Int(1); });
  const std::string text = thrown<qpu::CompileError>(
      [kept] { compile([kept](Ptr<Int> p) { *p = *kept; }, "second"); });
  CHECK(contains(text, "kernel 'second': a vector of another kernel"));
  delete kept;
}

TEST_CASE("other exceptions propagate and do not affect compile") {
  CHECK_THROWS_AS(compile([](Int) { throw 7; }), int);
  CHECK_NOTHROW(compile([](Int) {}));
  CHECK_THROWS_AS(Int(), qpu::CompileError);
}

TEST_CASE("errors carry kernel and construct separately") {
  try {
    compile([] { qpu::Else_(); }, "bad");
    FAIL("no exception");
  } catch (const qpu::Error& e) {
    CHECK(std::string(e.kernel()) == "bad");
    CHECK(std::string(e.construct()) == "Else");
  }
}

TEST_CASE("an operator's error names the preceding place") {
  SharedArray<int> a(16);
  const std::string text = thrown<qpu::BoundsError>([&a] {
    compile([](Ptr<Int> p) {
      Int x = 3;
      p[16] = x;
    })(&a);
  });
  CHECK(contains(text, "*p = ... (statement 2, after "));
}
