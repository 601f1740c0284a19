// The report that qpu-info prints: all findings, the obstacles to using the hardware, and their
// fixes.
#ifndef QPU_SRC_RUNTIME_REPORT_HPP
#define QPU_SRC_RUNTIME_REPORT_HPP

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/backends.hpp"
#include "runtime/board.hpp"
#include "runtime/device.hpp"
#include "runtime/obstacles.hpp"
#include "runtime/system.hpp"

namespace qpu::runtime {

struct Library {
  std::string version;
  std::string backend;  // "" if QPU_BACKEND cannot be used
  std::string reason;
};

struct V3dFacts {
  std::optional<std::uint32_t> ident0;
  std::optional<std::uint32_t> ident1;
  std::optional<std::uint32_t> clockHz;
  std::string source;  // where these values come from, or why they are missing
};

// A process that is listed in the state file.
struct User {
  std::uint32_t pid = 0;
  bool alive = false;
  bool holds = false;  // true if the process has enabled the QPUs
  std::size_t pieces = 0;  // number of the process's allocations of GPU memory
  std::uint64_t bytes = 0;
};

struct Findings {
  Library library;
  std::vector<BackendFinding> backends;
  Board board;
  System system;
  V3dFacts v3d;
  std::string stateFolder;
  std::vector<User> users;
  std::string note;  // a description of what recover() has released
};

// Collects all findings. If the root is not "/", the function does not access the hardware.
Findings findAll(const Host& host);
std::vector<User> usersOf(const std::string& stateFolder);

std::string asText(const Findings& findings);
std::string asJson(const Findings& findings);

// States what has not been verified on a board.
constexpr const char* kUnmeasured =
    "not measured on hardware: the mailbox, GPU memory, V3D's registers, and all statements about "
    "what the firmware allows";

}  // namespace qpu::runtime

#endif
