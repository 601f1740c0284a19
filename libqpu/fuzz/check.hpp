#ifndef QPU_FUZZ_CHECK_HPP
#define QPU_FUZZ_CHECK_HPP

#include <cstdlib>

// Aborts on failure, which libFuzzer reports as a crash.
inline void check(bool condition) {
  if (!condition) std::abort();
}

#endif
