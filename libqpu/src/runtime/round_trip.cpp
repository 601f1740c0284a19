#include "runtime/round_trip.hpp"

#include <array>

#include "error_facts.hpp"
#include "isa/text.hpp"
#include "runtime/obstacles.hpp"
#include "runtime/words.hpp"

namespace qpu::runtime {
namespace {

constexpr std::chrono::milliseconds kLimit(500);
// Offsets in a page of GPU memory.
constexpr std::uint32_t kUniforms = 512;
constexpr std::uint32_t kControl = 576;
constexpr std::uint32_t kFrom = 1024;
constexpr std::uint32_t kTo = 2048;
constexpr std::uint32_t kElements = 16;
constexpr std::uint32_t kPattern = 0x9e3779b9;

// Processes a line of 16 words: loads the words through a TMU, adds one to each word, and stores
// the results through the VPM.
constexpr std::array<const char*, 13> kProgram = {
    "shl r0, element_number, 2",
    "add tmu0_s, r0, uniform",
    "ldi vpm_wr_setup, 0x1a00",      // writes rows of 16 words, starting at row 0
    "nop; ldtmu0",
    "add vpm, r4, 1",
    "ldi vpm_wr_setup, 0x80904000",  // sets up DMA of 16 words from row 0
    "mov vpm_st_addr, uniform",
    "nop; read vpm_st_wait",
    "mov host_int, 1",
    "nop",
    "nop; thrend",
    "nop",
    "nop"};

}  // namespace

std::vector<isa::Word> roundTripProgram() {
  std::vector<isa::Word> words;
  words.reserve(kProgram.size());
  for (const char* line : kProgram) words.push_back(isa::assemble(line));
  return words;
}

void roundTrip(Device& device, Method method) {
  const auto page = device.allocate(4096, "");
  const auto at = [&page](std::uint32_t offset) {
    return reinterpret_cast<volatile std::uint32_t*>(page->host() + offset);
  };
  clearDeviceWords(page->host(), 4096 / 4);
  const std::vector<isa::Word> words = roundTripProgram();
  copyDeviceWords(page->host(), words.data(), 2 * words.size());
  at(kUniforms)[0] = page->bus() + kFrom;
  at(kUniforms)[1] = page->bus() + kTo;
  for (std::uint32_t i = 0; i < kElements; ++i) at(kFrom)[i] = kPattern * (i + 1);
  device.launch(method, {{page->bus() + kUniforms, page->bus()}}, *page, kControl,
                "round trip through GPU memory", kLimit);
  for (std::uint32_t i = 0; i < kElements; ++i)
    if (at(kTo)[i] != kPattern * (i + 1) + 1)
      raiseObstacle(wrongMapping(page->bus(), page->bus() & kPhysicalMask));
}

}  // namespace qpu::runtime
