// A running kernel's view of the SharedArrays.
#ifndef QPU_SRC_INTERP_MEMORY_HPP
#define QPU_SRC_INTERP_MEMORY_HPP

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mem/heap.hpp"

namespace qpu::interp {

// The arrays that were live when the kernel was called; they stay valid, if
// released meanwhile, until it returns.
class Memory {
 public:
  // Each of `users`, numbered from 0, remembers the array it touched last.
  explicit Memory(std::size_t users)
      : table_(detail::Heap::instance().table()), last_(users) {}

  // Host address of `bytes` bytes at `address`, null unless one array has all.
  unsigned char* find(std::size_t user, std::uint32_t address, std::uint32_t bytes) {
    const detail::Block* block = last_[user];
    if (block != nullptr) {
      const std::uint32_t offset = address - block->start;
      if (offset < block->bytes && block->bytes - offset >= bytes) return block->host + offset;
    }
    block = table_->find(address);
    if (block == nullptr || block->bytes - (address - block->start) < bytes) return nullptr;
    last_[user] = block;
    return block->host + (address - block->start);
  }

  // First of the words from `address` on that is in no array, or in another
  // one than the words before it.
  std::uint32_t firstOutside(std::uint32_t address) const {
    const detail::Block* block = table_->find(address);
    return block == nullptr ? address : block->start + block->bytes;
  }
  std::string nearest(std::uint32_t address) const { return table_->nearest(address); }

 private:
  std::shared_ptr<const detail::Table> table_;
  std::vector<const detail::Block*> last_;
};

}  // namespace qpu::interp

#endif
