// Selects the backend that runs kernels. QPU_BACKEND names the backend. If QPU_BACKEND is not set,
// the best backend that works is selected.
#ifndef QPU_SRC_RUNTIME_BACKENDS_HPP
#define QPU_SRC_RUNTIME_BACKENDS_HPP

#include <cstdint>
#include <string>
#include <vector>

namespace qpu::runtime {

enum class Kind : std::uint8_t { Registers, Mailbox, Interpreter, Emulator };

struct Choice {
  const char* name = nullptr;  // if null, there is no backend, and `text` is the error
  Kind kind = Kind::Interpreter;
  std::string text;
};

// Returns the choice for this thread. The choice is valid until the thread's next call.
const Choice& currentChoice();
// Returns the kind of the selected backend. Throws BackendError if there is no backend.
Kind requireBackend();

struct BackendFinding {
  std::string name;
  bool usable = false;
  std::string reason;
};

// Returns all backends in order of preference. The function accesses the hardware.
std::vector<BackendFinding> backendFindings();

}  // namespace qpu::runtime

#endif
