// The setup words, without addresses, for statements that set up the VPM or its DMA engines.
// Manual: section 7.
#ifndef QPU_SRC_COMPILER_LOWER_SETUP_HPP
#define QPU_SRC_COMPILER_LOWER_SETUP_HPP

#include <cstdint>

#include "lang/source.hpp"

namespace qpu::compiler::setup {

std::uint32_t dmaRead(const detail::Statement& s);
std::uint32_t dmaWrite(const detail::Statement& s);
std::uint32_t vpmRead(const detail::Statement& s);
std::uint32_t vpmWrite(const detail::Statement& s);

// Setup words whose only field is the statement's operand.
constexpr std::uint32_t kDmaReadPitch = 0x90000000U;
constexpr std::uint32_t kDmaWriteStride = 0xc0000000U;

}  // namespace qpu::compiler::setup

#endif
