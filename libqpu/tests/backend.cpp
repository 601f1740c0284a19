// Tests the selection of the backend by QPU_BACKEND in C++ and C.
#include <cstdlib>

#include "qpu.h"
#include "tests/run.hpp"

using test::contains;
using test::Setting;
using test::thrown;

TEST_CASE("the interpreter is the default") {
  unsetenv("QPU_BACKEND");
  CHECK(std::string(qpu::backend().name) == "interpreter");
  CHECK(contains(qpu::backend().reason, "QPU_BACKEND is not set"));
  CHECK(std::string(qpu_backend_name()) == "interpreter");
}

TEST_CASE("the interpreter runs if selected; empty means unset") {
  {
    const Setting backend("QPU_BACKEND", "interpreter");
    CHECK(std::string(qpu::backend().reason) == "selected by QPU_BACKEND=interpreter");
  }
  const Setting backend("QPU_BACKEND", "");
  CHECK(contains(qpu_backend_reason(), "is not set"));
}

TEST_CASE("the emulator runs if selected") {
  const Setting backend("QPU_BACKEND", "emulator");
  CHECK(std::string(qpu::backend().name) == "emulator");
  SharedArray<int> a(16);
  compile([](Ptr<Int> p) { *p = index() + me(); })(&a);
  for (int i = 0; i < 16; ++i) CHECK(a[i] == i);
}

TEST_CASE("hardware backends are rejected without hardware") {
  for (const char* name : {"vc4-mailbox", "vc4-registers"}) {
    const Setting backend("QPU_BACKEND", name);
    const std::string text = thrown<qpu::BackendError>([] { qpu::backend(); });
    CHECK(contains(text, "QPU_BACKEND=" + std::string(name) + ": "));
    CHECK(contains(text, "; "));  // the text contains a fix
    CHECK(qpu_backend_name() == nullptr);
    CHECK(qpu_backend_reason() == text);
  }
}

TEST_CASE("the error for an unknown backend lists the valid ones") {
  const Setting backend("QPU_BACKEND", "gpu");
  const std::string text = thrown<qpu::BackendError>([] { compile([](Int) {}); });
  CHECK(contains(text, "QPU_BACKEND=gpu does not name a backend"));
  for (const char* name : {"interpreter", "emulator", "vc4-mailbox", "vc4-registers"})
    CHECK(contains(text, name));
}

TEST_CASE("a call checks QPU_BACKEND again after compile") {
  const auto k = compile([](Int) {});
  const Setting backend("QPU_BACKEND", "abacus");
  CHECK_THROWS_AS(k(1), qpu::BackendError);
}

TEST_CASE("all interfaces report the same version") {
  CHECK(std::string(qpu_version()) == qpu::version());
  CHECK(std::string(qpu_version()) == EXPECTED_VERSION);
}
