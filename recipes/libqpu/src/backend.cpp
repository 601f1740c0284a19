#include "qpu/backend.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "error_facts.hpp"
#include "qpu.h"
#include "version.hpp"

namespace qpu {
namespace {

struct Known {
  std::string_view name;
  bool built;
};

constexpr std::array<Known, 4> kBackends = {{
    {"interpreter", true},
    {"emulator", false},
    {"vc4-mailbox", false},
    {"vc4-registers", false},
}};

std::string builtNames() {
  std::string names;
  for (const Known& k : kBackends)
    if (k.built) names += (names.empty() ? "" : ", ") + std::string(k.name);
  return names;
}

std::string allNames() {
  std::string names;
  for (const Known& k : kBackends) {
    names += (names.empty() ? "" : ", ") + std::string(k.name);
    if (!k.built) names += " (not in this build)";
  }
  return names;
}

struct Choice {
  const char* name;  // null: the text is an error
  std::string text;
};

Choice choose(const char* wanted) {
  if (wanted == nullptr || *wanted == '\0')
    return {kBackends[0].name.data(),
            "QPU_BACKEND is not set and the interpreter is the only backend in this build"};
  const auto* const found =
      std::find_if(kBackends.begin(), kBackends.end(),
                   [wanted](const Known& k) { return k.name == wanted; });
  const std::string setting = "QPU_BACKEND=" + std::string(wanted);
  if (found == kBackends.end())
    return {nullptr, setting + " names no backend; valid names are " + allNames()};
  if (!found->built)
    return {nullptr, setting + ": backend '" + std::string(found->name) +
                         "' is not in this build, use " + builtNames()};
  return {found->name.data(), "chosen by " + setting};
}

// Kept per thread so that the C interface can hand out its characters.
const Choice& currentChoice() {
  thread_local Choice choice;
  choice = choose(std::getenv("QPU_BACKEND"));  // NOLINT(concurrency-mt-unsafe): only read
  return choice;
}

}  // namespace

const char* version() noexcept { return QPU_VERSION; }

Backend backend() {
  const Choice& choice = currentChoice();
  if (choice.name == nullptr) detail::raise<BackendError>(choice.text);
  return {choice.name, choice.text.c_str()};
}

}  // namespace qpu

extern "C" {

const char* qpu_version(void) { return qpu::version(); }

const char* qpu_backend_name(void) {
  try {
    return qpu::currentChoice().name;
  } catch (...) {  // out of memory for the text
    return nullptr;
  }
}

const char* qpu_backend_reason(void) {
  try {
    return qpu::currentChoice().text.c_str();
  } catch (...) {
    return "out of memory";
  }
}

}  // extern "C"
