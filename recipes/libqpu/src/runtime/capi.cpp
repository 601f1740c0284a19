// qpu.h over the C++ below it. No exception crosses it.
#include <cstdlib>
#include <cstring>
#include <string>

#include "qpu.h"
#include "qpu/backend.h"
#include "runtime/backends.hpp"
#include "runtime/machine.hpp"
#include "runtime/report.hpp"

namespace qpu::runtime {
namespace {

thread_local std::string lastError;  // NOLINT: of the calls of this thread

// A copy that the caller frees.
char* copied(const std::string& text) {
  char* const copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy != nullptr) std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

void remember(const char* text) noexcept {
  try {
    lastError = text;
  } catch (...) {
    lastError.clear();
  }
}

// What `f` returns, or `failed` with the error's text kept.
template <typename T, typename F>
T guarded(T failed, F f) noexcept {
  try {
    return f();
  } catch (const std::exception& e) {
    remember(e.what());
  } catch (...) {
    remember("unknown error");
  }
  return failed;
}

}  // namespace
}  // namespace qpu::runtime

using qpu::runtime::guarded;

extern "C" {

const char* qpu_version(void) { return qpu::version(); }

const char* qpu_backend_name(void) {
  return guarded<const char*>(nullptr, [] { return qpu::runtime::currentChoice().name; });
}

const char* qpu_backend_reason(void) {
  return guarded<const char*>("out of memory",
                              [] { return qpu::runtime::currentChoice().text.c_str(); });
}

const char* qpu_last_error(void) { return qpu::runtime::lastError.c_str(); }

void qpu_free(void* text) { std::free(text); }

char* qpu_machine_report(const char* root, int json) {
  return guarded<char*>(nullptr, [root, json] {
    qpu::runtime::Host host = qpu::runtime::host();
    if (root != nullptr && std::string(root) != "/") {
      host.os = nullptr;
      host.root = qpu::runtime::Root(root);
    }
    const qpu::runtime::Findings f = findAll(host);
    return qpu::runtime::copied(json != 0 ? asJson(f) : asText(f));
  });
}

}  // extern "C"
