// The bus addresses of SharedArrays, and the host memory that contains their data.
#ifndef QPU_SRC_MEM_HEAP_HPP
#define QPU_SRC_MEM_HEAP_HPP

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "qpu/error.h"

namespace qpu::detail {

// Calls the functions that onAllocationFailure() has registered. Does nothing if this thread is
// already calling them.
void releaseUnused();

// Returns the result of `allocate`. If `allocate` throws AllocationError, calls releaseUnused() and
// then `allocate` again, because this thread or another one may have released memory. The caller
// must not hold a mutex that the release of an array locks.
template <typename F>
auto allocateOrRelease(F allocate) -> decltype(allocate()) {
  try {
    return allocate();
  } catch (const AllocationError&) {
    releaseUnused();
  }
  return allocate();
}

struct Block {
  std::uint32_t start = 0;  // bus address
  std::uint32_t bytes = 0;
  unsigned char* host = nullptr;
  bool device = false;                     // true if the block is in GPU memory
  std::shared_ptr<void> memory;            // owns `host`
};

// The live blocks, sorted by bus address. A table is immutable. A running kernel keeps the table
// that was current when it started, so that the memory of all blocks in this table stays allocated.
class Table {
 public:
  // Returns the block that contains `address`, or null.
  const Block* find(std::uint32_t address) const;
  // Describes the position of `address` relative to the nearest block.
  std::string nearest(std::uint32_t address) const;

  std::vector<std::shared_ptr<const Block>> blocks;
};

class Heap {
 public:
  // The instance is never destroyed, because static arrays can outlive any other static object.
  static Heap& instance();

  // Allocates `count` words, which are aligned to 64 bytes and filled with zeros. If kernels run
  // on the QPUs, the words are in GPU memory. Throws AllocationError if the allocation fails.
  std::shared_ptr<const Block> allocate(std::size_t count);
  void release(const Block* block) noexcept;
  std::shared_ptr<const Table> table() const;
  // Returns true if an array has ever been allocated in GPU memory.
  bool usesDevice() const noexcept { return usesDevice_; }

 private:
  Heap();
  std::shared_ptr<const Block> tryAllocate(std::size_t count, const std::string& what);
  // These functions allocate the memory of a block. The functions throw AllocationError with a
  // message that starts with `what`.
  static void takeHostMemory(Block& block, const std::string& what);
  void takeDeviceMemory(Block& block, const std::string& what);
  // Returns the start of a free range of `bytes` bytes, or 0 if no such range exists. The caller
  // must hold the mutex.
  std::uint32_t place(const Table& table, std::uint32_t bytes) const;

  mutable std::mutex mutex_;
  std::shared_ptr<const Table> table_;
  std::uint32_t next_;
  std::atomic<bool> usesDevice_{false};
};

}  // namespace qpu::detail

#endif
