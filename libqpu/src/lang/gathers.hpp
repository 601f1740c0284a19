// How many gathers of a kernel may be outstanding, and which TMU takes which.
#ifndef QPU_SRC_LANG_GATHERS_HPP
#define QPU_SRC_LANG_GATHERS_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lang/source.hpp"

namespace qpu::detail {

// Measured on hardware: one TMU takes 4 requests before it hangs.
constexpr std::size_t kTmuDepth = 4;

struct GatherPlan {
  // Requests go to both TMUs in a fixed pattern. That needs a kernel whose every
  // gather and receive has its place in the pattern whichever way led to it.
  bool usesBothTmus = false;
  std::size_t most = kTmuDepth;  // outstanding; twice as many where the TMUs alternate
  // TMU of each gather and receive, by Site::number; empty: all are TMU 0's.
  std::vector<std::uint8_t> units;
  // TMUs of the gathers that are outstanding at the end, oldest first, where
  // that is the same for every run.
  bool endIsKnown = false;
  std::vector<std::uint8_t> left;
};

GatherPlan planGathers(const Source& source);

}  // namespace qpu::detail

#endif
