// Identifies the board, and whether its SoC has QPUs that libqpu supports.
#ifndef QPU_SRC_RUNTIME_BOARD_HPP
#define QPU_SRC_RUNTIME_BOARD_HPP

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/root.hpp"

namespace qpu::runtime {

// A decoded revision code. Source: Raspberry Pi documentation, "revision codes". Codes
// without bit 23 are from the old list; all of them are BCM2835.
struct Revision {
  std::uint32_t code = 0;
  std::string soc;
  std::string model;
  int memoryMib = 0;  // 0: not in the code
  int boardRevision = -1;  // -1: not in the code
  bool overvolted = false;
};

Revision decodeRevision(std::uint32_t code);

enum class Soc : std::uint8_t {
  Suitable,   // VideoCore IV
  Unsuitable, // another QPU instruction set, or not a Raspberry Pi
  Unknown
};

struct Board {
  std::string model;                    // device tree; "" if there is none
  std::vector<std::string> compatible;  // device tree
  std::optional<Revision> revision;     // /proc/cpuinfo
  std::string socName;                  // "BCM2837"; "" if unknown
  Soc soc = Soc::Unknown;
  std::string verdict;  // one sentence with the reason
};

Board readBoard(const Root& root);

}  // namespace qpu::runtime

#endif
