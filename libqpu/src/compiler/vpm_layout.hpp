// The VPM rows that the compiler uses, and setup words for the VPM and its DMA engines. Manual:
// section 7, VPM and VCD/VDW.
#ifndef QPU_SRC_COMPILER_VPM_LAYOUT_HPP
#define QPU_SRC_COMPILER_VPM_LAYOUT_HPP

#include <cstdint>

namespace qpu::compiler::vpm {

// In kernels that do not set up the VPM themselves, a QPU's row is one of these constants plus
// the QPU number. Stores alternate between two rows, so that a QPU can write a vector while the
// previous vector is being stored. The write address wraps at 64, so a stride of 32 alternates
// between the two rows.
constexpr std::uint32_t kStoreRow = 0;
constexpr std::uint32_t kStoreRowDistance = 32;
constexpr std::uint32_t kLoadRow = 12;
constexpr std::uint32_t kSpillRow = 44;

// In kernels that merge stores, the maximum number of consecutive rows per QPU that one DMA
// transfer stores. The VPM has 64 rows in total, so each QPU has fewer rows if loads also go
// through the VPM.
constexpr std::uint32_t kMostMerged = 4;
constexpr std::uint32_t kMostMergedWithLoads = 2;
constexpr std::uint32_t kMergingLoadRow = 24;

// In kernels that set up the VPM themselves, a QPU's row for loads and stores is this constant
// minus the QPU number.
constexpr std::uint32_t kHandRow = 63;

// Returns a setup word for writing horizontal vectors. Consecutive vectors are `stride` rows
// apart.
constexpr std::uint32_t writeRows(std::uint32_t row, std::uint32_t stride) {
  return stride << 12U | 0xa00U | row;
}
constexpr std::uint32_t readRow(std::uint32_t row) { return 1U << 20U | 1U << 12U | 0xa00U | row; }
// Setup words for DMA transfers of rows of 16 words.
constexpr std::uint32_t kStoreDepthShift = 16;
constexpr std::uint32_t kStoreRowShift = 7;
constexpr std::uint32_t kLoadRowShift = 4;
constexpr std::uint32_t storeRow(std::uint32_t row, std::uint32_t words = 16) {
  return 2U << 30U | 1U << 23U | words << kStoreDepthShift | 1U << 14U | row << kStoreRowShift;
}
constexpr std::uint32_t storeRows(std::uint32_t rows) {
  return 2U << 30U | rows << 23U | 16U << kStoreDepthShift | 1U << 14U;
}
// The setup word for rows that are adjacent in memory.
constexpr std::uint32_t kNoStoreGap = 3U << 30U;
constexpr std::uint32_t loadRow(std::uint32_t row) {
  return 1U << 31U | 3U << 24U | 1U << 16U | 1U << 12U | row << kLoadRowShift;
}

}  // namespace qpu::compiler::vpm

#endif
