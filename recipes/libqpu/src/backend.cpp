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
  bool built;
};

// The best first.
constexpr std::array<Known, 4> kBackends = {{
    {"vc4-registers", Kind::Registers, false},
    {"vc4-mailbox", Kind::Mailbox, false},
    {"interpreter", Kind::Interpreter, true},
    {"emulator", Kind::Emulator, false},
}};

std::string names(bool builtOnly) {
  std::string all;
  for (const Known& k : kBackends) {
    if (builtOnly && !k.built) continue;
    all += (all.empty() ? "" : ", ") + std::string(k.name);
    if (!k.built) all += " (not in this build)";
  }
  return all;
}

// "" when the backend works.
std::string faultOf(const Known& k) {
  if (!k.built) return "is not in this build, use " + names(true);
  if (k.kind == Kind::Interpreter || k.kind == Kind::Emulator) return {};
  const Opened& opened = openDevice();
  if (!opened.device) return opened.fault;
  return opened.device->fault(k.kind == Kind::Registers ? Method::Registers : Method::Mailbox);
}

Choice best() {
  std::string why = "QPU_BACKEND is not set";
  std::string last;
  for (const Known& k : kBackends) {
    if (!k.built) continue;
    const std::string fault = faultOf(k);
    if (fault.empty()) return {k.name.data(), k.kind, why + "; " + std::string(k.name) + " is the best that works"};
    // One reason for both ways to the hardware is told once.
    if (fault != last) why += "; " + std::string(k.name) + ": " + fault;
    last = fault;
  }
  return {nullptr, Kind::Interpreter, why};  // not reached: the interpreter always works
}

Choice choose(const std::string& wanted) {
  if (wanted.empty()) return best();
  const auto* const found =
      std::find_if(kBackends.begin(), kBackends.end(),
                   [&wanted](const Known& k) { return k.name == wanted; });
  const std::string setting = "QPU_BACKEND=" + wanted;
  if (found == kBackends.end())
    return {nullptr, Kind::Interpreter,
            setting + " names no backend; valid names are " + names(false)};
  if (const std::string fault = faultOf(*found); !fault.empty())
    return {nullptr, found->kind,
            setting + ": " + (found->built ? "" : "backend '" + wanted + "' ") + fault};
  return {found->name.data(), found->kind, "chosen by " + setting};
}

}  // namespace

const Choice& currentChoice() {
  // Kept per thread so that the C interface can hand out its characters.
  struct Kept {
    std::optional<std::string> wanted;
    unsigned generation = 0;
    Choice choice;
  };
  thread_local Kept kept;
  const char* const set = std::getenv("QPU_BACKEND");  // NOLINT(concurrency-mt-unsafe): only read
  const std::string_view wanted = set == nullptr ? "" : set;
  const unsigned generation = hostGeneration();
  if (!kept.wanted || *kept.wanted != wanted || kept.generation != generation) {
    kept.choice = choose(std::string(wanted));
    kept.wanted = wanted;
    kept.generation = generation;
  }
  return kept.choice;
}

Kind requireBackend() {
  const Choice& choice = currentChoice();
  if (choice.name == nullptr) detail::raise<BackendError>(choice.text);
  return choice.kind;
}

std::vector<BackendFinding> backendFindings() {
  std::vector<BackendFinding> found;
  for (const Known& k : kBackends) {
    const std::string fault = faultOf(k);
    std::string reason = fault;
    if (fault.empty() && k.kind == Kind::Interpreter) reason = "the reference, on the CPU";
    if (fault.empty() && k.kind == Kind::Emulator) reason = "machine code, on the CPU";
    if (fault.empty() && reason.empty()) reason = "the QPUs of this board";
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
