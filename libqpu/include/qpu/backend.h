// The library's version, and the backend that runs kernels. qpu.h provides the same for C.
#ifndef QPU_BACKEND_H
#define QPU_BACKEND_H

#include "qpu/detail/export.h"

namespace qpu {

// Version of libqpu.so, "major.minor.patch".
QPU_API const char* version() noexcept;

struct Backend {
  const char* name;    // the name used in QPU_BACKEND
  const char* reason;  // one sentence: why it was selected; valid until this thread's next call to backend()
};

// Returns the backend that the environment variable QPU_BACKEND selects; if it is not set, the
// best backend that works. Throws BackendError if QPU_BACKEND names an unknown backend, or one
// that does not work on this machine.
QPU_API Backend backend();

}  // namespace qpu

#endif
