#include "emu/memory.hpp"

#include <algorithm>

#include "error_facts.hpp"

namespace qpu::emu {
namespace {

std::string text(const Region& r) {
  return "the SharedArray of " + std::to_string(r.bytes / 4) + " elements at " +
         detail::hex(r.start) + ".." + detail::hex(r.start + r.bytes - 1);
}

}  // namespace

std::size_t Memory::after(std::uint32_t address) const {
  const auto found =
      std::upper_bound(regions_->begin(), regions_->end(), address,
                       [](std::uint32_t a, const Region& r) { return a < r.start; });
  return static_cast<std::size_t>(found - regions_->begin());
}

std::uint32_t Memory::search(std::uint32_t address, std::uint32_t bytes,
                             std::uint32_t& last) const {
  const std::size_t n = after(address);
  if (n == 0 || !holds((*regions_)[n - 1], address, bytes)) return kNone;
  last = static_cast<std::uint32_t>(n - 1);
  return last;
}

std::uint32_t Memory::firstOutside(std::uint32_t address) const {
  const std::size_t n = after(address);
  if (n == 0 || !holds((*regions_)[n - 1], address, 1)) return address;
  return (*regions_)[n - 1].start + (*regions_)[n - 1].bytes;
}

std::string Memory::nearest(std::uint32_t address) const {
  if (regions_->empty()) return "there is no live SharedArray";
  const std::size_t n = after(address);
  const Region* below = n == 0 ? nullptr : &(*regions_)[n - 1];
  const Region* above = n == regions_->size() ? nullptr : &(*regions_)[n];
  const std::uint32_t before = above != nullptr ? above->start - address : UINT32_MAX;
  if (below != nullptr) {
    const std::uint32_t past = address - below->start - below->bytes;
    if (above == nullptr || past <= before)
      return "the nearest is " + text(*below) + "; the address is " + std::to_string(past) +
             " bytes past its end";
  }
  if (above == nullptr) return {};  // unreachable: there is at least one region
  return "the nearest is " + text(*above) + "; the address is " + std::to_string(before) +
         " bytes before its start";
}

}  // namespace qpu::emu
