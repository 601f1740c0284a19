#include "isa/setup.hpp"

namespace qpu::isa {
namespace {

constexpr unsigned kRows = 64, kColumns = 16;
constexpr unsigned kSize32 = 2, kSizeNone = 3;

constexpr std::uint32_t field(std::uint32_t word, unsigned high, unsigned low) {
  return word >> low & ((2U << (high - low)) - 1U);
}

constexpr std::uint32_t orElse(std::uint32_t value, std::uint32_t forZero) {
  return value == 0 ? forZero : value;
}

const char* vectorFault(std::uint32_t word) {
  const std::uint32_t size = field(word, 9, 8);
  if (size == kSizeNone) return "size 3 does not exist";
  // The number of bits in ADDR that are used. These bits contain the row, the column and the part
  // of the word.
  const unsigned bits = size == kSize32 ? 6 : size == 1 ? 7 : 8;
  if (field(word, 7, 0) >> bits != 0) return "the row is not in 0..63";
  return nullptr;
}

}  // namespace

Setup setupKind(std::uint32_t word, bool readSide) {
  switch (word >> 30U) {
    case 0: return readSide ? Setup::VpmRead : Setup::VpmWrite;
    case 1: return Setup::Unknown;
    case 2:
      if (!readSide) return Setup::DmaStore;
      return word >> 28U == 9 ? Setup::LoadPitch : Setup::DmaLoad;
    default: return readSide ? Setup::DmaLoad : Setup::StoreStride;
  }
}

const char* setupFault(std::uint32_t word, bool readSide) {
  switch (setupKind(word, readSide)) {
    case Setup::Unknown: return "bits 31:30 are 1";
    case Setup::VpmRead:
    case Setup::VpmWrite: return vectorFault(word);
    case Setup::DmaLoad:
      if (field(word, 10, 4) >= kRows) return "the row is not in 0..63";
      break;
    case Setup::DmaStore:
      if (field(word, 13, 7) >= kRows) return "the row is not in 0..63";
      if (field(word, 2, 0) == 1) return "width 1 does not exist";
      if (field(word, 15, 15) != 0) return "bit 15 is set";
      break;
    case Setup::StoreStride:
      if (field(word, 15, 0) >= kStrideLimit) return "the stride is 8192 bytes or more";
      break;
    case Setup::LoadPitch: break;
  }
  return nullptr;
}

unsigned setupVectors(std::uint32_t word) { return orElse(field(word, 23, 20), 16); }

VpmWords vectorWords(std::uint32_t vpmReadSetup) {
  VpmWords words;
  if (field(vpmReadSetup, 9, 8) != kSize32) return words;
  const bool horizontal = field(vpmReadSetup, 11, 11) != 0;
  const std::uint32_t stride = orElse(field(vpmReadSetup, 17, 12), 64);
  std::uint32_t at = field(vpmReadSetup, 5, 0);
  for (unsigned v = setupVectors(vpmReadSetup); v > 0; --v, at = (at + stride) % kRows) {
    for (unsigned e = 0; e < kColumns; ++e) {
      const unsigned row = horizontal ? at : (at & 0x30U) + e;
      words.set(row * kColumns + (horizontal ? e : at % kColumns));
    }
  }
  return words;
}

VpmWords loadWords(std::uint32_t dmaLoadSetup) {
  VpmWords words;
  if (field(dmaLoadSetup, 30, 28) != 0) return words;
  const std::uint32_t length = orElse(field(dmaLoadSetup, 23, 20), 16);
  const std::uint32_t rows = orElse(field(dmaLoadSetup, 19, 16), 16);
  const std::uint32_t pitch = orElse(field(dmaLoadSetup, 15, 12), 16);
  const bool vertical = field(dmaLoadSetup, 11, 11) != 0;
  const std::uint32_t y = field(dmaLoadSetup, 10, 4);
  const std::uint32_t x = field(dmaLoadSetup, 3, 0);
  if (y >= kRows) return words;
  // Only the emulator models rows that wrap, and columns after the first one.
  const bool wraps = y % 16 + (rows - 1) * pitch >= 16;
  const std::uint32_t known = vertical || wraps ? 1 : rows;
  for (std::uint32_t r = 0; r < known; ++r) {
    for (std::uint32_t n = 0; n < length; ++n) {
      const std::uint32_t row = vertical ? y + n : y + r * pitch;
      const std::uint32_t column = vertical ? x : x + n;
      if (row < kRows && column < kColumns) words.set(row * kColumns + column);
    }
  }
  return words;
}

}  // namespace qpu::isa
