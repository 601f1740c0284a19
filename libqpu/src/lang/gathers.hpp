// Determines how many gathers of a kernel can be outstanding at the same time, and which TMU
// handles each gather.
#ifndef QPU_SRC_LANG_GATHERS_HPP
#define QPU_SRC_LANG_GATHERS_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lang/source.hpp"

namespace qpu::detail {

// The manual specifies 8 outstanding requests per TMU, but more than 4 have been reported as
// unreliable on hardware. This project has not measured this limit on hardware.
constexpr std::size_t kTmuDepth = 4;

struct GatherPlan {
  // True if requests alternate between both TMUs in a fixed pattern. A fixed pattern requires that
  // each gather and each receive has the same position in the pattern on all paths.
  bool usesBothTmus = false;
  // Maximum number of outstanding gathers. It is twice as high if the TMUs alternate.
  std::size_t most = kTmuDepth;
  // The TMU of each gather and receive, indexed by Site::number. If the list is empty, all gathers
  // and receives use TMU 0.
  std::vector<std::uint8_t> units;
  // endIsKnown is true if the gathers that are outstanding at the end use the same TMUs in every
  // run. If endIsKnown is true, `left` contains these TMUs, starting with the TMU of the oldest
  // gather.
  bool endIsKnown = false;
  std::vector<std::uint8_t> left;
};

GatherPlan planGathers(const Source& source);

}  // namespace qpu::detail

#endif
