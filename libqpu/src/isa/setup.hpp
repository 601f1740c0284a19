// Checks individual setup words for the VPM and its DMA engines.
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

// Returns a description of the error in the setup word, or null if no error is known.
const char* setupFault(std::uint32_t word, bool readSide);

// Returns the number of vectors (1..16) that a VpmRead setup announces.
unsigned setupVectors(std::uint32_t word);

// It has been reported that stores with a stride of at least this size do not work.
constexpr std::uint32_t kStrideLimit = 8192;

// The VPM words that a 32-bit setup is certain to access, numbered row * 16 + column. The set is
// empty for other sizes.
using VpmWords = std::bitset<1024>;
VpmWords vectorWords(std::uint32_t vpmReadSetup);
VpmWords loadWords(std::uint32_t dmaLoadSetup);

}  // namespace qpu::isa

#endif
