// Which library this is and what runs its kernels. qpu.h has the same for C.
#ifndef QPU_BACKEND_H
#define QPU_BACKEND_H

#include "qpu/detail/export.h"

namespace qpu {

// Version of libqpu.so, "major.minor.patch".
QPU_API const char* version() noexcept;

struct Backend {
  const char* name;    // as QPU_BACKEND takes it
  const char* reason;  // why this one, one sentence; valid until this thread asks again
};

// Chosen by the environment variable QPU_BACKEND, else the best that works.
// Throws BackendError when QPU_BACKEND names none, or one that does not work here.
QPU_API Backend backend();

}  // namespace qpu

#endif
