// Which VPM rows the compiler uses for what, and the words that set the VPM and
// its DMA up. Manual: section 7, VPM and VCD/VDW.
#ifndef QPU_SRC_COMPILER_VPM_LAYOUT_HPP
#define QPU_SRC_COMPILER_VPM_LAYOUT_HPP

#include <cstdint>

namespace qpu::compiler::vpm {

// Kernels that leave the VPM to the compiler: QPU number + these. Stores use two
// rows in turn: a vector is written while the one before is still being stored.
// The write address wraps at 64, so a stride of 32 alternates between them.
constexpr std::uint32_t kStoreRow = 0;
constexpr std::uint32_t kStoreRowDistance = 32;
constexpr std::uint32_t kLoadRow = 12;
constexpr std::uint32_t kSpillRow = 44;

// Kernels with stores to neighbouring places: this many rows in a row for each QPU,
// which one DMA stores. Fewer where loads go through the VPM, for 64 are all there are.
constexpr std::uint32_t kMostMerged = 4;
constexpr std::uint32_t kMostMergedBesideLoads = 2;
constexpr std::uint32_t kMergingLoadRow = 24;

// Kernels that use the VPM by hand: this - QPU number, for stores and loads.
constexpr std::uint32_t kHandRow = 63;

// Vectors along rows, each `stride` rows after the one before.
constexpr std::uint32_t writeRows(std::uint32_t row, std::uint32_t stride) {
  return stride << 12U | 0xa00U | row;
}
constexpr std::uint32_t readRow(std::uint32_t row) { return 1U << 20U | 1U << 12U | 0xa00U | row; }
// DMA of rows of 16 words.
constexpr std::uint32_t kStoreDepthShift = 16;
constexpr std::uint32_t kStoreRowShift = 7;
constexpr std::uint32_t kLoadRowShift = 4;
constexpr std::uint32_t storeRow(std::uint32_t row, std::uint32_t words = 16) {
  return 2U << 30U | 1U << 23U | words << kStoreDepthShift | 1U << 14U | row << kStoreRowShift;
}
constexpr std::uint32_t storeRows(std::uint32_t rows) {
  return 2U << 30U | rows << 23U | 16U << kStoreDepthShift | 1U << 14U;
}
// Rows of memory follow each other without a gap.
constexpr std::uint32_t kNoStoreGap = 3U << 30U;
constexpr std::uint32_t loadRow(std::uint32_t row) {
  return 1U << 31U | 3U << 24U | 1U << 16U | 1U << 12U | row << kLoadRowShift;
}

}  // namespace qpu::compiler::vpm

#endif
