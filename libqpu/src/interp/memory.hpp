// The SharedArrays that a running kernel can access.
#ifndef QPU_SRC_INTERP_MEMORY_HPP
#define QPU_SRC_INTERP_MEMORY_HPP

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mem/heap.hpp"

namespace qpu::interp {

// The arrays that were live when the kernel was called. The arrays stay valid until the kernel
// returns, even if the program releases them earlier.
class Memory {
 public:
  // A user is an instruction that accesses memory. The users are numbered from 0. For each user,
  // the object caches the array that the user accessed last.
  explicit Memory(std::size_t users)
      : table_(detail::Heap::instance().table()), last_(users) {}

  // Returns the host address of the `bytes` bytes at `address`, or null if no array contains all of
  // these bytes.
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

  // Returns the first address after `address` that is not in the array that contains `address`. If
  // `address` is not in any array, returns `address` itself.
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
