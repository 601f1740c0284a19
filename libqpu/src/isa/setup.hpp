// Setup words of the VPM and its DMA engines, as far as they can be judged by
// themselves.
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

// What is wrong with it; null if nothing is known to be.
const char* setupFault(std::uint32_t word, bool readSide);

// Vectors that a VpmRead setup announces, 1..16.
unsigned setupVectors(std::uint32_t word);

// Store strides from this on are reported broken.
constexpr std::uint32_t kStrideLimit = 8192;

// Words row * 16 + column of the VPM that are certain to be touched by 32-bit
// setups; none for others.
using VpmWords = std::bitset<1024>;
VpmWords vectorWords(std::uint32_t vpmReadSetup);
VpmWords loadWords(std::uint32_t dmaLoadSetup);

}  // namespace qpu::isa

#endif
