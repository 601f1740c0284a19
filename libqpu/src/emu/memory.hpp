// The memory that a launch may touch.
#ifndef QPU_SRC_EMU_MEMORY_HPP
#define QPU_SRC_EMU_MEMORY_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "emu/emulator.hpp"

namespace qpu::emu {

class Memory {
 public:
  // The regions must outlive it.
  void reset(const std::vector<Region>& regions) { regions_ = &regions; }

  // Index of the region that holds all `bytes` bytes at `address`, or kNone.
  // `last` is where the caller found something before.
  static constexpr std::uint32_t kNone = UINT32_MAX;
  std::uint32_t find(std::uint32_t address, std::uint32_t bytes, std::uint32_t& last) const {
    if (last < regions_->size() && holds((*regions_)[last], address, bytes)) return last;
    return search(address, bytes, last);
  }
  unsigned char* host(std::uint32_t region, std::uint32_t address) const {
    const Region& r = (*regions_)[region];
    return r.host + (address - r.start);
  }

  // First of the words from `address` on that is in no region, or in another
  // one than the words before it.
  std::uint32_t firstOutside(std::uint32_t address) const;
  std::string nearest(std::uint32_t address) const;

 private:
  static bool holds(const Region& r, std::uint32_t address, std::uint32_t bytes) {
    const std::uint32_t offset = address - r.start;
    return offset < r.bytes && r.bytes - offset >= bytes;
  }
  std::uint32_t search(std::uint32_t address, std::uint32_t bytes, std::uint32_t& last) const;
  std::size_t after(std::uint32_t address) const;  // first region beyond it

  const std::vector<Region>* regions_ = nullptr;
};

}  // namespace qpu::emu

#endif
