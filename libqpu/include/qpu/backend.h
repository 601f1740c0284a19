// Functions that return the library's version and the backend that runs kernels. The C interface,
// qpu.h, has corresponding functions.
#ifndef QPU_BACKEND_H
#define QPU_BACKEND_H

#include "qpu/detail/export.h"

namespace qpu {

// Returns the version of libqpu.so as "major.minor.patch".
QPU_API const char* version() noexcept;

struct Backend {
  const char* name;  // the backend's name, in the form that QPU_BACKEND accepts
  // A sentence that says why the backend was selected. The text is valid until this thread calls
  // backend() again.
  const char* reason;
};

// Returns the backend that the environment variable QPU_BACKEND selects. If the variable is not
// set, returns the best backend that works on this machine. Throws BackendError if the variable
// names an unknown backend or a backend that does not work on this machine.
QPU_API Backend backend();

}  // namespace qpu

#endif
