// Identifies the board, and determines whether its SoC has QPUs that libqpu supports.
#ifndef QPU_SRC_RUNTIME_BOARD_HPP
#define QPU_SRC_RUNTIME_BOARD_HPP

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/root.hpp"

namespace qpu::runtime {

// A decoded revision code. Source: Raspberry Pi documentation, "revision codes". If bit 23 of a
// code is 0, the code comes from the old list, and its SoC is BCM2835.
struct Revision {
  std::uint32_t code = 0;
  std::string soc;
  std::string model;
  int memoryMib = 0;  // 0 if the code does not contain the size
  int boardRevision = -1;  // -1 if the code does not contain the number
  bool overvolted = false;
};

Revision decodeRevision(std::uint32_t code);

enum class Soc : std::uint8_t {
  Suitable,   // the SoC has a VideoCore IV
  Unsuitable, // the QPUs have a different instruction set, or the board is not a Raspberry Pi
  Unknown
};

struct Board {
  std::string model;                    // from the device tree; "" if unknown
  std::vector<std::string> compatible;  // from the device tree
  std::optional<Revision> revision;     // from /proc/cpuinfo
  std::string socName;                  // such as "BCM2837"; "" if unknown
  Soc soc = Soc::Unknown;
  std::string verdict;  // a sentence that includes the reason
};

Board readBoard(const Root& root);

}  // namespace qpu::runtime

#endif
