// Where in the kernel's source a construct stands, for error texts.
#ifndef QPU_LOCATION_H
#define QPU_LOCATION_H

namespace qpu {

// File and line of a construct. Operators cannot carry one; errors about them
// name the last location seen before.
struct Location {
  const char* file;
  int line;

  Location() : file(nullptr), line(0) {}
  Location(const char* f, int l) : file(f), line(l) {}
};

}  // namespace qpu

// As a default argument this names the caller (GCC 4.8, Clang 9 and later).
#define QPU_HERE ::qpu::Location(__builtin_FILE(), __builtin_LINE())

#endif
