// The location of a construct in the kernel's source. Error messages contain this location.
#ifndef QPU_LOCATION_H
#define QPU_LOCATION_H

namespace qpu {

// The file and line of a construct. An operator has no argument for a location, so an error
// message about an operator contains the location of the preceding construct.
struct Location {
  const char* file;
  int line;

  Location() : file(nullptr), line(0) {}
  Location(const char* f, int l) : file(f), line(l) {}
};

}  // namespace qpu

// If QPU_HERE is used as a default argument, it gives the caller's location. Requires GCC 4.8 or
// Clang 9.
#define QPU_HERE ::qpu::Location(__builtin_FILE(), __builtin_LINE())

#endif
