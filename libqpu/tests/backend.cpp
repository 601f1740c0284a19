// Choice of the backend by QPU_BACKEND, in C++ and C.
#include <cstdlib>

#include "qpu.h"
#include "tests/run.hpp"

using test::contains;
using test::thrown;

namespace {

struct Setting {
  explicit Setting(const char* value) { setenv("QPU_BACKEND", value, 1); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  ~Setting() { unsetenv("QPU_BACKEND"); }
};

}  // namespace

TEST_CASE("the interpreter runs when nothing is asked for") {
  unsetenv("QPU_BACKEND");
  CHECK(std::string(qpu::backend().name) == "interpreter");
  CHECK(contains(qpu::backend().reason, "QPU_BACKEND is not set"));
  CHECK(std::string(qpu_backend_name()) == "interpreter");
}

TEST_CASE("the interpreter runs when asked for, and empty means not asked") {
  {
    const Setting s("interpreter");
    CHECK(std::string(qpu::backend().reason) == "selected by QPU_BACKEND=interpreter");
  }
  const Setting s("");
  CHECK(contains(qpu_backend_reason(), "is not set"));
}

TEST_CASE("the emulator runs when asked for") {
  const Setting s("emulator");
  CHECK(std::string(qpu::backend().name) == "emulator");
  SharedArray<int> a(16);
  compile([](Ptr<Int> p) { *p = index() + me(); })(&a);
  for (int i = 0; i < 16; ++i) CHECK(a[i] == i);
}

TEST_CASE("the hardware's backends are refused where there is none") {
  for (const char* name : {"vc4-mailbox", "vc4-registers"}) {
    const Setting s(name);
    const std::string text = thrown<qpu::BackendError>([] { qpu::backend(); });
    CHECK(contains(text, "QPU_BACKEND=" + std::string(name) + ": "));
    CHECK(contains(text, "; "));  // the fix
    CHECK(qpu_backend_name() == nullptr);
    CHECK(qpu_backend_reason() == text);
  }
}

TEST_CASE("an unknown name is answered with the valid ones") {
  const Setting s("gpu");
  const std::string text = thrown<qpu::BackendError>([] { compile([](Int) {}); });
  CHECK(contains(text, "QPU_BACKEND=gpu does not name a backend"));
  for (const char* name : {"interpreter", "emulator", "vc4-mailbox", "vc4-registers"})
    CHECK(contains(text, name));
}

TEST_CASE("a call is refused too when the setting changed after compile") {
  const auto k = compile([](Int) {});
  const Setting s("abacus");
  CHECK_THROWS_AS(k(1), qpu::BackendError);
}

TEST_CASE("versions agree") {
  CHECK(std::string(qpu_version()) == qpu::version());
  CHECK(std::string(qpu_version()) == EXPECTED_VERSION);
}
