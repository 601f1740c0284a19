// Tests direct access to the VPM and to DMA.
#include "tests/run.hpp"

using test::contains;
using test::thrown;

namespace {

SharedArray<int> counting(int n) {
  SharedArray<int> a(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) a[i] = i;
  return a;
}

template <typename F>
std::string fails(F f) {
  return thrown<qpu::ExecutionError>([f] {
    SharedArray<int> a = counting(256);
    compile(f, "vpm")(&a);
  });
}

}  // namespace

TEST_CASE("loading rows and reading columns transposes") {
  SharedArray<int> a = counting(256), out(256);
  compile([](Ptr<Int> p, Ptr<Int> q) {
    dmaSetReadPitch(64);
    dmaSetupRead(HORIZ, 16, 16 * 16);
    dmaStartRead(p);
    dmaWaitRead();
    vpmSetupRead(VERT, 16, 16);
    for (int i = 0; i < 16; ++i) q[16 * i] = vpmGetInt();
  })(&a, &out);
  for (int i = 0; i < 256; ++i) CHECK(out[i] == (i % 16) * 16 + i / 16);
}

TEST_CASE("columns can be loaded and stored as rows") {
  SharedArray<int> a = counting(256), out(256);
  compile([](Ptr<Int> p, Ptr<Int> q) {
    for (int column = 0; column < 16; ++column) {
      dmaSetupRead(VERT, 1, column);
      dmaStartRead(p + 16 * column);
      dmaWaitRead();
    }
    dmaSetWriteStride(0);
    dmaSetupWrite(HORIZ, 16, 0);
    dmaStartWrite(q);
    dmaWaitWrite();
  })(&a, &out);
  for (int i = 0; i < 256; ++i) CHECK(out[i] == (i % 16) * 16 + i / 16);
}

TEST_CASE("the VPM pitch applies to rows and columns") {
  SharedArray<int> a = counting(256), out(256);
  const auto windowAfter = [&](void (*load)(Ptr<Int>)) {
    auto k = compile([load](Ptr<Int> p, Ptr<Int> q) {
      load(p);
      dmaSetWriteStride(0);
      dmaSetupWrite(HORIZ, 16, 0);
      dmaStartWrite(q);
      dmaWaitWrite();
    });
    k(&a, &out);
  };
  // Sixteen memory rows of one word fill a column.
  windowAfter([](Ptr<Int> p) {
    dmaSetReadPitch(64);
    dmaSetupRead(VERT, 16, 5, 1);
    dmaStartRead(p);
    dmaWaitRead();
  });
  for (int row = 0; row < 16; ++row) CHECK(out[16 * row + 5] == 16 * row);
  // Each row has three words. The rows are four VPM rows apart, and all rows are in column 7.
  windowAfter([](Ptr<Int> p) {
    dmaSetReadPitch(64);
    dmaSetupRead(VERT, 4, 7, 3, 4);
    dmaStartRead(p);
    dmaWaitRead();
  });
  for (int row = 0; row < 4; ++row)
    for (int i = 0; i < 3; ++i) CHECK(out[16 * (4 * row + i) + 7] == 16 * row + i);
}

TEST_CASE("columns of 16 words fill a column of the VPM") {
  SharedArray<int> a = counting(64), out(64);
  compile([](Ptr<Int> p, Ptr<Int> q) {
    dmaSetReadPitch(64);
    dmaSetupRead(VERT, 4, 9, 16, 16);
    dmaStartRead(p);
    dmaWaitRead();
    dmaSetupWrite(VERT, 1, 9, 64);
    dmaStartWrite(q);
    dmaWaitWrite();
  })(&a, &out);
  for (int i = 0; i < 64; ++i) CHECK(out[i] == i);
}

TEST_CASE("columns can be stored") {
  SharedArray<int> a = counting(256), out(256);
  compile([](Ptr<Int> p, Ptr<Int> q) {
    dmaSetReadPitch(64);
    dmaSetupRead(HORIZ, 16, 0);
    dmaStartRead(p);
    dmaWaitRead();
    dmaSetWriteStride(0);
    dmaSetupWrite(VERT, 16, 0, 16);
    dmaStartWrite(q);
    dmaWaitWrite();
  })(&a, &out);
  for (int i = 0; i < 256; ++i) CHECK(out[i] == (i % 16) * 16 + i / 16);
}

TEST_CASE("read pitch and write stride are measured as documented") {
  SharedArray<int> a = counting(256), out(256);
  compile([](Ptr<Int> p, Ptr<Int> q) {
    dmaSetReadPitch(128);              // selects every other row of 16 words
    // Loads the first 8 words of these rows into VPM rows 0, 2, 4 and 6.
    dmaSetupRead(HORIZ, 4, 0, 8, 2);
    dmaStartRead(p);
    dmaWaitRead();
    dmaSetWriteStride(32);
    dmaSetupWrite(HORIZ, 7, 0, 8);
    dmaStartWrite(q);
    dmaWaitWrite();
  })(&a, &out);
  for (int row = 0; row < 7; ++row)
    for (int i = 0; i < 16; ++i)
      CHECK(out[16 * row + i] == (i < 8 && row % 2 == 0 ? 16 * row + i : 0));
}

TEST_CASE("vectors are written and read with a stride") {
  SharedArray<int> out(64);
  compile([](Ptr<Int> q) {
    vpmSetupWrite(HORIZ, 10, 5);
    for (int i = 0; i < 4; ++i) vpmPut(index() + 100 * i);
    vpmSetupRead(HORIZ, 2, 10, 10);
    q[0] = vpmGetInt();
    q[16] = vpmGetInt();
    vpmSetupWrite(HORIZ, 50, 15);
    vpmPut(7);
    vpmPut(index() * 2);  // row 65 wraps to row 1
    vpmSetupRead(HORIZ, 1, 1);
    q[32] = vpmGetInt();
  })(&out);
  for (int i = 0; i < 16; ++i) {
    CHECK(out[i] == i);
    CHECK(out[16 + i] == 200 + i);
    CHECK(out[32 + i] == 2 * i);
  }
}

TEST_CASE("floats pass the VPM unchanged") {
  SharedArray<float> out(16);
  compile([](Ptr<Float> q) {
    vpmSetupWrite(VERT, 3);
    vpmPut(toFloat(index()) * 0.5F);
    vpmSetupRead(VERT, 1, 3);
    *q = vpmGetFloat() + 1.0F;
  })(&out);
  for (int i = 0; i < 16; ++i) CHECK(out[i] == 0.5F * static_cast<float>(i) + 1.0F);
}

TEST_CASE("all QPUs share the VPM") {
  SharedArray<int> out(16);
  auto k = compile([](Ptr<Int> q) {
    If (any(me() == 0))
      vpmSetupWrite(HORIZ, 51);
      vpmPut(index() * 3);
      semaInc(0);
    Else
      semaDec(0);
      vpmSetupRead(HORIZ, 1, 51);
      *q = vpmGetInt();
    End
  });
  k.setNumQPUs(2);
  k(&out);
  for (int i = 0; i < 16; ++i) CHECK(out[i] == 3 * i);
}

TEST_CASE("a load during a manual DMA load waits for it") {
  SharedArray<int> a = counting(64), out(16 * 6);
  out[16] = 100;
  compile([](Ptr<Int> p, Ptr<Int> q) {
    store(3, q);
    dmaSetReadPitch(64);
    dmaSetupRead(HORIZ, 4, 0);
    dmaStartRead(p);
    Int x = q[16];  // loaded through the VPM, because a store precedes the load
    dmaWaitRead();
    vpmSetupRead(HORIZ, 4, 0);
    for (int i = 0; i < 4; ++i) store(vpmGetInt() + x, q + 32 + 16 * i);
  })(&a, &out);
  CHECK(out[0] == 3);
  for (int row = 0; row < 4; ++row) CHECK(out[32 + 16 * row] == 16 * row + 100);
}

TEST_CASE("invalid sequences of VPM calls are errors") {
  // The emulator also reports these errors, but with its own messages.
  const auto checkError = [](auto f, const char* text) {
    const std::string found = fails(f);
    CHECK(contains(found, "kernel 'vpm'"));
    CHECK((test::onEmulator() || contains(found, text)));
  };
  checkError([](Ptr<Int> p) { *p = vpmGetInt(); }, "more vectors than vpmSetupRead has set up");
  checkError([](Ptr<Int>) { vpmPut(1); }, "vpmSetupWrite is missing");
  checkError([](Ptr<Int>) { vpmSetupRead(HORIZ, 2, 0); }, "before reading 2 vectors");
  checkError([](Ptr<Int> p) {
    vpmSetupRead(HORIZ, 2, 0);
    *p = vpmGetInt();
    vpmSetupRead(HORIZ, 2, 0);
  }, "1 vectors of the previous vpmSetupRead are unread");
  checkError([](Ptr<Int> p) { dmaStartRead(p); }, "dmaSetupRead is missing");
  checkError([](Ptr<Int> p) { dmaStartWrite(p); }, "dmaSetupWrite is missing");
  checkError([](Ptr<Int> p) {
    dmaSetupRead(HORIZ, 2, 0);
    dmaStartRead(p);
  }, "dmaSetReadPitch first");
  checkError([](Ptr<Int> p) {
    dmaSetupRead(HORIZ, 1, 0);
    dmaStartRead(p);
    dmaStartRead(p);
  }, "has not waited for the previous DMA transfer");
  checkError([](Ptr<Int> p) {
    dmaSetupRead(HORIZ, 1, 0);
    dmaStartRead(p);
    vpmSetupRead(HORIZ, 1, 0);
  }, "dmaWaitRead is missing");
  const auto forgetting = [](Ptr<Int> p) {
    dmaSetupWrite(HORIZ, 1, 0);
    dmaStartWrite(p);
  };
  // Compiled code waits for the transfers before it ends.
  if (test::onEmulator()) {
    SharedArray<int> a = counting(256);
    CHECK_NOTHROW(compile(forgetting, "vpm")(&a));
  } else {
    checkError(forgetting, "dmaWaitWrite is missing");
  }
}

TEST_CASE("VPM places out of range are errors at the call") {
  const auto checkError = [](auto f, int x, const char* text) {
    SharedArray<int> a = counting(256);
    const std::string found =
        thrown<qpu::ExecutionError>([&] { compile(f, "vpm")(x, &a); });
    CHECK(contains(found, "kernel 'vpm'"));
    CHECK((test::onEmulator() || contains(found, text)));
  };
  const auto reading = [](Int x, Ptr<Int> p) {
    dmaSetReadPitch(64);
    dmaSetupRead(HORIZ, 2, x);
    dmaStartRead(p);
    dmaWaitRead();
  };
  checkError(reading, 64 * 16, "exceed the window");
  checkError(reading, 8, "exceed the window");
  checkError([](Int x, Ptr<Int> p) {
    dmaSetupWrite(HORIZ, 1, x);
    dmaStartWrite(p);
    dmaWaitWrite();
  }, -1, "exceed the window");
  checkError([](Int x, Ptr<Int>) {
    vpmSetupWrite(HORIZ, x);
    vpmPut(1);
  }, 64, "must be 0..63");
  checkError([](Int x, Ptr<Int>) { dmaSetWriteStride(x); }, -4, "-4 bytes");
  // If a setup word cannot represent a value, only the interpreter can detect the error.
  if (test::onEmulator()) return;
  checkError(reading, 63 * 16, "2 rows by 16 columns from VPM word 1008 exceed the window");
  checkError([](Int x, Ptr<Int>) { dmaSetReadPitch(x); }, 8192, "must be 0..8191");
}

TEST_CASE("DMA outside of an array is an error") {
  SharedArray<int> a(40);
  CHECK_THROWS_AS(compile([](Ptr<Int> p) {
                    dmaSetReadPitch(64);
                    dmaSetupRead(HORIZ, 3, 0);
                    dmaStartRead(p);
                    dmaWaitRead();
                  })(&a),
                  qpu::BoundsError);
  // Loading only the last 8 words of the array is not an error.
  compile([](Ptr<Int> p) {
    dmaSetupRead(HORIZ, 1, 0, 8);
    dmaStartRead(p + 32);
    dmaWaitRead();
  })(&a);
}
