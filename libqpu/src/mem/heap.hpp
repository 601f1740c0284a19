// The bus addresses of SharedArrays, and their host memory.
#ifndef QPU_SRC_MEM_HEAP_HPP
#define QPU_SRC_MEM_HEAP_HPP

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace qpu::detail {

struct Block {
  std::uint32_t start = 0;  // bus address
  std::uint32_t bytes = 0;
  unsigned char* host = nullptr;
  bool device = false;                     // in GPU memory
  std::shared_ptr<void> memory;            // owns `host`
};

// Live blocks, ordered by bus address. A table is immutable. A running kernel keeps the table
// that was current when it started, and with it the memory of every block in that table.
class Table {
 public:
  // The block that contains `address`, or null.
  const Block* find(std::uint32_t address) const;
  // Describes the position of `address` relative to the nearest block.
  std::string nearest(std::uint32_t address) const;

  std::vector<std::shared_ptr<const Block>> blocks;
};

class Heap {
 public:
  // Never destroyed, because static arrays can outlive any other static object.
  static Heap& instance();

  // Allocates `count` words, aligned to 64 bytes and zero-filled. They are in GPU memory if
  // kernels run on the QPUs. Throws AllocationError.
  std::shared_ptr<const Block> allocate(std::size_t count);
  void release(const Block* block) noexcept;
  std::shared_ptr<const Table> table() const;
  // Whether an array has ever been allocated in GPU memory.
  bool usesDevice() const noexcept { return usesDevice_; }

 private:
  Heap();
  // Allocate the memory of a block. Throw AllocationError; its message starts with `what`.
  static void takeHostMemory(Block& block, const std::string& what);
  void takeDeviceMemory(Block& block, const std::string& what);
  // Returns the start of a free range of `bytes`, or 0 if there is none. The caller must hold the
  // mutex.
  std::uint32_t place(const Table& table, std::uint32_t bytes) const;

  mutable std::mutex mutex_;
  std::shared_ptr<const Table> table_;
  std::uint32_t next_;
  std::atomic<bool> usesDevice_{false};
};

}  // namespace qpu::detail

#endif
