// The symbols of a linked kernel, for a static loader, which cannot open libraries. TVM compiled the kernel, and the
// linker added it to the loader. PITORCH_ENTRY is the kernel's function.
#include <cstdint>
#include <cstring>

// NOLINTBEGIN(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp): TVM's names
extern "C" {
int PITORCH_ENTRY(void *handle, const void *arguments, int32_t count, void *result);
// A kernel defines these pointers if it needs functions from TVM's runtime.
extern void *__TVMBackendParallelLaunch __attribute__((weak));
extern void *__TVMBackendAllocWorkspace __attribute__((weak));
extern void *__TVMBackendFreeWorkspace __attribute__((weak));
}

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

extern "C" void *pitorch_linked(const char *name) {
  const struct {
    const char *name;
    void *address;
  } known[] = {
      {TEXT(PITORCH_ENTRY), reinterpret_cast<void *>(&PITORCH_ENTRY)},
      {"__TVMBackendParallelLaunch", &__TVMBackendParallelLaunch},
      {"__TVMBackendAllocWorkspace", &__TVMBackendAllocWorkspace},
      {"__TVMBackendFreeWorkspace", &__TVMBackendFreeWorkspace},
  };
  for (const auto &each : known)
    if (std::strcmp(name, each.name) == 0) return each.address;
  return nullptr;
}
// NOLINTEND(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp)
