#include "qpu/backend.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "error_facts.hpp"
#include "runtime/backends.hpp"
#include "runtime/machine.hpp"
#include "version.hpp"

namespace qpu {
namespace runtime {
namespace {

struct Known {
  std::string_view name;
  Kind kind;
};

// The backends in order of preference.
constexpr std::array<Known, 4> kBackends = {{
    {"vc4-registers", Kind::Registers},
    {"vc4-mailbox", Kind::Mailbox},
    {"interpreter", Kind::Interpreter},
    {"emulator", Kind::Emulator},
}};

// Returns the reason why the backend does not work, or "" if it works.
std::string faultOf(Kind kind) {
  if (kind == Kind::Interpreter || kind == Kind::Emulator) return {};
  const Opened& opened = openDevice();
  if (!opened.device) return opened.fault;
  return opened.device->fault(kind == Kind::Registers ? Method::Registers : Method::Mailbox);
}

Choice best() {
  std::string why = "QPU_BACKEND is not set";
  std::string last;
  for (const Known& k : kBackends) {
    const std::string fault = faultOf(k.kind);
    if (fault.empty())
      return {k.name.data(), k.kind, why + "; using backend " + std::string(k.name)};
    // If the same reason applies to both hardware backends, report it only once.
    if (fault != last) why += "; " + std::string(k.name) + ": " + fault;
    last = fault;
  }
  return {nullptr, Kind::Interpreter, why};  // unreachable: the interpreter always works
}

Choice choose(const std::string& requested) {
  if (requested.empty()) return best();
  const auto* const found =
      std::find_if(kBackends.begin(), kBackends.end(),
                   [&requested](const Known& k) { return k.name == requested; });
  const std::string setting = "QPU_BACKEND=" + requested;
  if (found == kBackends.end()) {
    std::string names;
    for (const Known& k : kBackends) names += (names.empty() ? "" : ", ") + std::string(k.name);
    return {nullptr, Kind::Interpreter, setting + " does not name a backend; valid names are " + names};
  }
  if (const std::string fault = faultOf(found->kind); !fault.empty())
    return {nullptr, found->kind, setting + ": " + fault};
  return {found->name.data(), found->kind, "selected by " + setting};
}

}  // namespace

const Choice& currentChoice() {
  // The choice is cached per thread, so that the C interface can return a pointer to its text.
  struct Cached {
    std::optional<std::string> requested;
    unsigned generation = 0;
    Choice choice;
  };
  thread_local Cached cached;
  const char* const set = std::getenv("QPU_BACKEND");  // NOLINT(concurrency-mt-unsafe): only read
  const std::string_view requested = set == nullptr ? "" : set;
  const unsigned generation = hostGeneration();
  if (!cached.requested || *cached.requested != requested || cached.generation != generation) {
    cached.choice = choose(std::string(requested));
    cached.requested = requested;
    cached.generation = generation;
  }
  return cached.choice;
}

Kind requireBackend() {
  const Choice& choice = currentChoice();
  if (choice.name == nullptr) detail::raise<BackendError>(choice.text);
  return choice.kind;
}

std::vector<BackendFinding> backendFindings() {
  std::vector<BackendFinding> found;
  for (const Known& k : kBackends) {
    const std::string fault = faultOf(k.kind);
    std::string reason = fault;
    if (fault.empty())
      reason = k.kind == Kind::Interpreter ? "on the CPU, from the source"
               : k.kind == Kind::Emulator  ? "on the CPU, from machine code"
                                           : "the QPUs of this board";
    found.push_back({std::string(k.name), fault.empty(), reason});
  }
  return found;
}

}  // namespace runtime

const char* version() noexcept { return QPU_VERSION; }

Backend backend() {
  const runtime::Choice& choice = runtime::currentChoice();
  if (choice.name == nullptr) detail::raise<BackendError>(choice.text);
  return {choice.name, choice.text.c_str()};
}

}  // namespace qpu
