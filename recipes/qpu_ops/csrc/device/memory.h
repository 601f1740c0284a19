// Device memory, which is shared with the QPUs, mapped for the CPU and, when a tensor is freed,
// cached for later tensors. Independent of torch.
#ifndef TORCH_QPU_MEMORY_H
#define TORCH_QPU_MEMORY_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace torch_qpu {

// The message states the memory in use, the available memory and possible remedies.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Alignment of tensor memory in bytes: the size of a cache line of V3D.
constexpr std::size_t kAlignment = 64;

// At least `bytes` bytes, a multiple of 4; null for 0. Throws OutOfMemory, and
// std::runtime_error in a process that was forked after its parent opened the hardware.
void* allocate(std::size_t bytes);
// Takes a pointer from allocate(), or null. Never throws: memory that cannot be recorded leaks.
void release(void* memory) noexcept;

// Whether an address is in memory that is currently allocated.
bool owns(const void* memory);

// Releases cached memory that no tensor uses.
void release_cached();

// Limit in bytes for the memory of tensors and the cache together; 0 means as much as libqpu
// provides.
void set_limit(std::size_t bytes);
std::size_t limit();

// Whether the CPU can use the memory like its own. On a board, QPU memory is mapped uncached, and
// accesses to single bytes and unaligned words may fault, so the CPU works on copies.
// QPU_TORCH_COPY=1 selects copies everywhere.
bool is_plain_memory();
// Copies whole words between device memory and any memory; `bytes` is rounded up to a multiple of
// 4 if both sides have room.
void copy_words(void* to, const void* from, std::size_t bytes);

// Bytes and counts since the start, or since reset_peaks().
std::map<std::string, std::int64_t> memory_statistics();
void reset_peaks();

// Held while a kernel runs, and while the process forks.
std::mutex& device_mutex();
// Must be called once, at import. Throws std::system_error.
void install_fork_handlers();
// Whether this process was forked from one whose QPUs it must not use.
bool in_bad_fork();

}  // namespace torch_qpu

#endif
