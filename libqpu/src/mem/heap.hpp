// The bus address space that SharedArrays live in, and their host memory.
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
  std::shared_ptr<void> memory;            // holds host
};

// Live blocks in order of their bus addresses. Immutable: a running kernel
// keeps the table it started with, and with it every block's memory.
class Table {
 public:
  // The block that holds `address`, or null.
  const Block* find(std::uint32_t address) const;
  // Where `address` is in respect of the nearest block, in words for people.
  std::string nearest(std::uint32_t address) const;

  std::vector<std::shared_ptr<const Block>> blocks;
};

class Heap {
 public:
  // Never destroyed: arrays of static storage may outlive any other static.
  static Heap& instance();

  // 64-byte aligned and zero-filled, in GPU memory when kernels run on the QPUs.
  // Throws AllocationError.
  std::shared_ptr<const Block> allocate(std::size_t count);
  void release(const Block* block) noexcept;
  std::shared_ptr<const Table> table() const;
  // Whether any array ever was in GPU memory.
  bool usesDevice() const noexcept { return usesDevice_; }

 private:
  Heap();
  // What the addresses lie in. Throws AllocationError with `what` before its text.
  static void takeHostMemory(Block& block, const std::string& what);
  void takeDeviceMemory(Block& block, const std::string& what);
  // Start of a gap for `bytes`, 0 when there is none. Caller holds the mutex.
  std::uint32_t place(const Table& table, std::uint32_t bytes) const;

  mutable std::mutex mutex_;
  std::shared_ptr<const Table> table_;
  std::uint32_t next_;
  std::atomic<bool> usesDevice_{false};
};

}  // namespace qpu::detail

#endif
