// Device memory, which is shared with the QPUs and mapped for the CPU. When a tensor is freed, its
// memory is cached for later tensors. This file does not depend on torch.
#ifndef TORCH_QPU_MEMORY_H
#define TORCH_QPU_MEMORY_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace torch_qpu {

// The message contains the size of the memory in use, the size of the available memory, and
// possible remedies.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The alignment of a tensor's memory in bytes, which is the size of a V3D cache line.
constexpr std::size_t kAlignment = 64;

// Returns at least `bytes` bytes, rounded up to a multiple of 4. Returns null if `bytes` is 0.
// Throws OutOfMemory. Throws std::runtime_error in a process that was forked after its parent
// opened the hardware.
void* allocate(std::size_t bytes);
// Releases memory that allocate() returned. `memory` can be null. Never throws. If the release
// cannot be recorded, the memory leaks.
void release(void* memory) noexcept;

// Returns true if the address is in memory that is currently allocated.
bool owns(const void* memory);

// Releases the cached memory that no tensor uses.
void release_cached();

// The limit in bytes for the memory of tensors and of the cache together. 0 means that only
// libqpu's limit applies.
void set_limit(std::size_t bytes);
std::size_t limit();

// Returns true if the CPU can use device memory like ordinary memory. On a board, QPU memory is
// mapped uncached. Accesses to single bytes and to unaligned words may cause faults there, so the
// CPU works on copies. QPU_TORCH_COPY=1 selects copies on all machines.
bool is_plain_memory();
// Copies whole words between device memory and any memory, including device memory. `bytes` is
// rounded up to a multiple of 4, so both sides must have room for the rounded size.
void copy_words(void* to, const void* from, std::size_t bytes);

// Returns counts, and sizes in bytes. Peak sizes are those since the last call of reset_peaks().
std::map<std::string, std::int64_t> memory_statistics();
void reset_peaks();

// This mutex is locked while a kernel runs and while the process forks.
std::mutex& device_mutex();
// Registers functions that fork() calls, and a function that libqpu calls if it cannot allocate
// memory. install_handlers() must be called once, when the module is imported. Throws
// std::system_error.
void install_handlers();
// Returns true if this process was forked from a process whose QPUs it must not use.
bool in_bad_fork();

}  // namespace torch_qpu

#endif
