// Determines how many of a kernel's gathers can be outstanding, and which TMU handles each
// gather.
#ifndef QPU_SRC_LANG_GATHERS_HPP
#define QPU_SRC_LANG_GATHERS_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lang/source.hpp"

namespace qpu::detail {

// Measured on hardware: a TMU hangs if more than 4 requests are outstanding.
constexpr std::size_t kTmuDepth = 4;

struct GatherPlan {
  // Requests alternate between both TMUs in a fixed pattern. This requires that the
  // position of every gather and receive in the pattern is the same on all paths.
  bool usesBothTmus = false;
  std::size_t most = kTmuDepth;  // outstanding; twice as many if the TMUs alternate
  // The TMU of each gather and receive, by Site::number. If empty, all use TMU 0.
  std::vector<std::uint8_t> units;
  // The TMUs of the gathers that are outstanding at the end, oldest first, if they are the same
  // for every run.
  bool endIsKnown = false;
  std::vector<std::uint8_t> left;
};

GatherPlan planGathers(const Source& source);

}  // namespace qpu::detail

#endif
