// The loader's entry point on an Android phone, and the functions that the compiler's libraries require from the C
// library. The compiler and its static libraries are those for glibc; Android's C library (bionic) provides the
// functions in bionic.txt. Structures that the loader passes to these functions (stat, dirent, pollfd, timespec) are
// the same in both libraries on this architecture.
#include <dlfcn.h>
#include <link.h>

// Bionic's linker calls the constructors. Destructors in .fini_array are not registered: they would only free
// memory, which the kernel frees when the process exits.
asm(R"(
  .text
  .globl _start
  .type _start, %function
_start:
  mov x29, #0
  mov x30, #0
  mov x0, sp
  mov x1, #0
  adrp x2, main
  add x2, x2, :lo12:main
  adrp x3, no_structors
  add x3, x3, :lo12:no_structors
  b __libc_init
  .size _start, . - _start
  .local no_structors
  .comm no_structors, 64, 8
)");

namespace {

// Bionic keeps its own data between the thread pointer and the program's thread-local variables. Bionic therefore
// requires these variables to be aligned to 64 bytes.
alignas(64) thread_local char aligned __attribute__((used, retain));

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp): names in the libraries
extern "C" {
int *__errno();
int __cxa_atexit(void (*function)(void *), void *argument, void *library);
int pthread_key_create(unsigned *key, void (*destroy)(void *));
unsigned long getauxval(unsigned long type);
char *getenv(const char *name) noexcept;
char *__gnu_strerror_r(int code, char *text, unsigned long size);
long long bionic_strtoll(const char *text, char **end, int base) __asm__("strtoll");
unsigned long bionic_strtoul(const char *text, char **end, int base) __asm__("strtoul");

extern const ElfW(Ehdr) __ehdr_start __attribute__((visibility("hidden")));
extern const char _end __attribute__((visibility("hidden")));

extern void *const __dso_handle __attribute__((visibility("hidden"))) = nullptr;
char __libc_single_threaded = 0;

int *__errno_location() noexcept { return __errno(); }

unsigned long __getauxval(unsigned long type) { return getauxval(type); }

char *gettext(const char *text) noexcept { return const_cast<char *>(text); }

char *secure_getenv(const char *name) noexcept { return getenv(name); }

// Bionic's own strerror_r returns an int.
char *strerror_r(int code, char *text, unsigned long size) noexcept { return __gnu_strerror_r(code, text, size); }

// Recent headers of glibc replace strtoll and strtoul with these functions.
long long __isoc23_strtoll(const char *text, char **end, int base) noexcept { return bionic_strtoll(text, end, base); }

unsigned long __isoc23_strtoul(const char *text, char **end, int base) noexcept {
  return bionic_strtoul(text, end, base);
}

int __pthread_key_create(unsigned *key, void (*destroy)(void *)) { return pthread_key_create(key, destroy); }

int atexit(void (*function)()) noexcept {
  const auto call = [](void *given) { reinterpret_cast<void (*)()>(given)(); };
  return __cxa_atexit(call, reinterpret_cast<void *>(function), nullptr);
}

// Finds only the loader's own exception table, because no exception passes through other libraries.
int _dl_find_object(void *address, dl_find_object *result) noexcept {
  const auto *base = reinterpret_cast<const char *>(&__ehdr_start);
  if (address < base || address >= &_end) return -1;
  const auto *headers = reinterpret_cast<const ElfW(Phdr) *>(base + __ehdr_start.e_phoff);
  for (int i = 0; i < __ehdr_start.e_phnum; i++) {
    if (headers[i].p_type != PT_GNU_EH_FRAME) continue;
    result->dlfo_eh_frame = const_cast<char *>(base + headers[i].p_vaddr);
    return 0;
  }
  return -1;
}
}
// NOLINTEND(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp)
