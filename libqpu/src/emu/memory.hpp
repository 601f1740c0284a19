// The memory that a launch can access.
#ifndef QPU_SRC_EMU_MEMORY_HPP
#define QPU_SRC_EMU_MEMORY_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "emu/emulator.hpp"

namespace qpu::emu {

class Memory {
 public:
  // The regions must outlive this object.
  void reset(const std::vector<Region>& regions) { regions_ = &regions; }

  // Returns the index of the region that contains all `bytes` bytes at `address`, or kNone.
  // `last` caches the index of the region that was found last.
  static constexpr std::uint32_t kNone = UINT32_MAX;
  std::uint32_t find(std::uint32_t address, std::uint32_t bytes, std::uint32_t& last) const {
    if (last < regions_->size() && holds((*regions_)[last], address, bytes)) return last;
    return search(address, bytes, last);
  }
  unsigned char* host(std::uint32_t region, std::uint32_t address) const {
    const Region& r = (*regions_)[region];
    return r.host + (address - r.start);
  }

  // Returns the first address after `address` that is not in the region that contains `address`. If
  // `address` is not in any region, returns `address` itself.
  std::uint32_t firstOutside(std::uint32_t address) const;
  std::string nearest(std::uint32_t address) const;

 private:
  static bool holds(const Region& r, std::uint32_t address, std::uint32_t bytes) {
    const std::uint32_t offset = address - r.start;
    return offset < r.bytes && r.bytes - offset >= bytes;
  }
  std::uint32_t search(std::uint32_t address, std::uint32_t bytes, std::uint32_t& last) const;
  // Index of the first region that starts after the address.
  std::size_t after(std::uint32_t address) const;

  const std::vector<Region>* regions_ = nullptr;
};

}  // namespace qpu::emu

#endif
