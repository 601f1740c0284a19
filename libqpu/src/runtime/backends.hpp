// Which backend runs kernels: QPU_BACKEND says, else the best that works.
#ifndef QPU_SRC_RUNTIME_BACKENDS_HPP
#define QPU_SRC_RUNTIME_BACKENDS_HPP

#include <cstdint>
#include <string>
#include <vector>

namespace qpu::runtime {

enum class Kind : std::uint8_t { Registers, Mailbox, Interpreter, Emulator };

struct Choice {
  const char* name = nullptr;  // null: the text is an error
  Kind kind = Kind::Interpreter;
  std::string text;
};

// Of this thread; valid until it asks again.
const Choice& currentChoice();
// The same; throws BackendError.
Kind requireBackend();

struct BackendFinding {
  std::string name;
  bool usable = false;
  std::string reason;
};

// All of them, the best first. Tries the hardware.
std::vector<BackendFinding> backendFindings();

}  // namespace qpu::runtime

#endif
