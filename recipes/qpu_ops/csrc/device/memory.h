// Memory of the device: shared with the QPUs, mapped for the CPU, and kept for
// later tensors when one dies. Nothing of torch here.
#ifndef TORCH_QPU_MEMORY_H
#define TORCH_QPU_MEMORY_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace torch_qpu {

// The text says how much is in use, how much there is and what to do.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What tensors hold starts at a multiple of this, in bytes: a line of V3D's cache.
constexpr std::size_t kAlignment = 64;

// At least `bytes` bytes, a multiple of 4; null for 0. Throws OutOfMemory, and
// std::runtime_error in a process that was forked off one with hardware open.
void* allocate(std::size_t bytes);
// What allocate() returned, or null. Never throws: what cannot be noted is lost.
void release(void* memory) noexcept;

// Whether an address lies in memory that is allocated now.
bool owns(const void* memory);

// Give back what no tensor uses.
void release_cached();

// Bytes that the device may hold, tensors and kept memory together; 0: as much as
// libqpu gives.
void set_limit(std::size_t bytes);
std::size_t limit();

// Whether the CPU reaches the memory like its own. On the QPUs of a board it is
// mapped uncached, where single bytes and unaligned words may fault: then the CPU
// works on copies. QPU_TORCH_COPY=1 has that everywhere.
bool is_plain_memory();
// Copies whole words between such memory and any other; `bytes` is rounded up to 4
// where both sides have the room.
void copy_words(void* to, const void* from, std::size_t bytes);

// Bytes and numbers since the start, or since reset_peaks().
std::map<std::string, std::int64_t> memory_statistics();
void reset_peaks();

// Held while a kernel runs, and while a process forks.
std::mutex& device_mutex();
// To be called once, at import. Throws std::system_error.
void install_fork_handlers();
// Whether this process was forked off one whose QPUs it must not touch.
bool in_bad_fork();

}  // namespace torch_qpu

#endif
