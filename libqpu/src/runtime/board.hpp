// Which board this is, and whether its SoC has QPUs that libqpu knows.
#ifndef QPU_SRC_RUNTIME_BOARD_HPP
#define QPU_SRC_RUNTIME_BOARD_HPP

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/root.hpp"

namespace qpu::runtime {

// A revision code taken apart. Source: Raspberry Pi documentation, "revision
// codes"; codes without bit 23 are the old list, all of them BCM2835.
struct Revision {
  std::uint32_t code = 0;
  std::string soc;
  std::string model;
  int memoryMib = 0;  // 0: the code does not say
  int boardRevision = -1;  // -1: the code does not say
  bool overvolted = false;
};

Revision decodeRevision(std::uint32_t code);

enum class Soc : std::uint8_t {
  Suitable,   // VideoCore IV
  Unsuitable, // another QPU instruction set, or no Raspberry Pi
  Unknown
};

struct Board {
  std::string model;                    // device tree, "" when there is none
  std::vector<std::string> compatible;  // device tree
  std::optional<Revision> revision;     // /proc/cpuinfo
  std::string socName;                  // "BCM2837", "" when unknown
  Soc soc = Soc::Unknown;
  std::string verdict;  // why, one sentence
};

Board readBoard(const Root& root);

}  // namespace qpu::runtime

#endif
