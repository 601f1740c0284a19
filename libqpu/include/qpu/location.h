// The position of a construct in the kernel's source, for error messages.
#ifndef QPU_LOCATION_H
#define QPU_LOCATION_H

namespace qpu {

// File and line of a construct. Operators cannot carry a location; error messages about them
// contain the previous location.
struct Location {
  const char* file;
  int line;

  Location() : file(nullptr), line(0) {}
  Location(const char* f, int l) : file(f), line(l) {}
};

}  // namespace qpu

// As a default argument, this is the location of the caller (GCC 4.8, Clang 9 and later).
#define QPU_HERE ::qpu::Location(__builtin_FILE(), __builtin_LINE())

#endif
