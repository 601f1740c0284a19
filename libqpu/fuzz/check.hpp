#ifndef QPU_FUZZ_CHECK_HPP
#define QPU_FUZZ_CHECK_HPP

#include <cstdlib>

// Aborts if the condition is false. libFuzzer reports this as a crash.
inline void check(bool condition) {
  if (!condition) std::abort();
}

#endif
