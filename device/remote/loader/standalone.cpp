// The functions from TVM's runtime that kernels require. Kernels for boards without TVM are linked with them. Other
// definitions in the process (in the loader or in TVM itself) take precedence.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::array<char, 1024> text;
constexpr std::size_t ALIGNMENT = 64;

void *allocate(int, int, std::uint64_t bytes, int, int) {
  return std::aligned_alloc(ALIGNMENT, (static_cast<std::size_t>(bytes) + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
}

int release(int, int, void *memory) {
  std::free(memory);
  return 0;
}

}  // namespace

// A kernel that needs temporary memory defines these pointers and calls the runtime through them.
// NOLINTBEGIN(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp): TVM's names
extern "C" {
extern void *(*__TVMBackendAllocWorkspace)(int, int, std::uint64_t, int, int) __attribute__((weak));
extern int (*__TVMBackendFreeWorkspace)(int, int, void *) __attribute__((weak));
}

__attribute__((constructor)) static void offer() {
  if (&__TVMBackendAllocWorkspace != nullptr) __TVMBackendAllocWorkspace = &allocate;
  if (&__TVMBackendFreeWorkspace != nullptr) __TVMBackendFreeWorkspace = &release;
}
// NOLINTEND(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp)

// Called by a kernel whose arguments do not match.
EXPORTED __attribute__((weak)) void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts,
                                                                      std::int32_t count) {
  int used = std::snprintf(text.data(), text.size(), "%s: ", kind);
  for (std::int32_t i = 0; i < count && used >= 0 && used < static_cast<int>(text.size()); i++)
    if (parts[i] != nullptr)
      used += std::snprintf(text.data() + used, text.size() - static_cast<std::size_t>(used), "%s", parts[i]);
}

// The message of the last failed call in this thread.
EXPORTED const char *pitorch_raised(void) { return text.data(); }
