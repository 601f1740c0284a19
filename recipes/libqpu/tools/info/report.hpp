// All findings, what stands in the way of the hardware, and how to mend it.
#ifndef QPU_TOOLS_INFO_REPORT_HPP
#define QPU_TOOLS_INFO_REPORT_HPP

#include <string>
#include <vector>

#include "tools/info/board.hpp"
#include "tools/info/system.hpp"

namespace qpu::info {

struct Library {
  std::string version;
  std::string backend;  // "" when QPU_BACKEND cannot be served
  std::string reason;
};

struct Obstacle {
  std::string what;
  std::string mend;
};

std::vector<Obstacle> obstacles(const Board& board, const System& system);

std::string asText(const Library& library, const Board& board, const System& system);
std::string asJson(const Library& library, const Board& board, const System& system);

// What no one has yet seen on a board.
constexpr const char* kUnmeasured =
    "not measured on hardware: the mailbox question and every judgement about what firmware allows";

}  // namespace qpu::info

#endif
