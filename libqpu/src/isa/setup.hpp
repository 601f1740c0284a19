// Checks of single setup words for the VPM and its DMA engines.
#ifndef QPU_SRC_ISA_SETUP_HPP
#define QPU_SRC_ISA_SETUP_HPP

#include <bitset>
#include <cstdint>

namespace qpu::isa {

enum class Setup : std::uint8_t {
  Unknown,
  VpmRead, DmaLoad, LoadPitch,     // written to VPM_RD_SETUP
  VpmWrite, DmaStore, StoreStride  // written to VPM_WR_SETUP
};

Setup setupKind(std::uint32_t word, bool readSide);

// Describes the error in the word. Null if no error is known.
const char* setupFault(std::uint32_t word, bool readSide);

// Vectors that a VpmRead setup announces, 1..16.
unsigned setupVectors(std::uint32_t word);

// Store strides of at least this size are reported not to work.
constexpr std::uint32_t kStrideLimit = 8192;

// The words of the VPM, numbered row * 16 + column, that a 32-bit setup certainly accesses. Empty for other sizes.
using VpmWords = std::bitset<1024>;
VpmWords vectorWords(std::uint32_t vpmReadSetup);
VpmWords loadWords(std::uint32_t dmaLoadSetup);

}  // namespace qpu::isa

#endif
