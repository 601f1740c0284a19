// Selects the backend that runs kernels: the one in QPU_BACKEND or, by default, the best that
// works.
#ifndef QPU_SRC_RUNTIME_BACKENDS_HPP
#define QPU_SRC_RUNTIME_BACKENDS_HPP

#include <cstdint>
#include <string>
#include <vector>

namespace qpu::runtime {

enum class Kind : std::uint8_t { Registers, Mailbox, Interpreter, Emulator };

struct Choice {
  const char* name = nullptr;  // null: no backend, and the text is the error
  Kind kind = Kind::Interpreter;
  std::string text;
};

// The selection for this thread; valid until the thread's next call.
const Choice& currentChoice();
// Returns the kind of the selected backend. Throws BackendError if there is none.
Kind requireBackend();

struct BackendFinding {
  std::string name;
  bool usable = false;
  std::string reason;
};

// Returns all backends in order of preference. Accesses the hardware.
std::vector<BackendFinding> backendFindings();

}  // namespace qpu::runtime

#endif
