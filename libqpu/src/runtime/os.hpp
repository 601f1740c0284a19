// The operating system functions that access the hardware. Tests replace this interface with a
// test double. The rest of the runtime is the same for a real VideoCore and for the test double.
#ifndef QPU_SRC_RUNTIME_OS_HPP
#define QPU_SRC_RUNTIME_OS_HPP

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace qpu::runtime {

class Os {
 public:
  Os() = default;
  Os(const Os&) = delete;
  Os& operator=(const Os&) = delete;
  virtual ~Os() = default;

  // These functions perform the system calls with the same names. On failure they return the
  // negative errno. close() and ioctl() are async-signal-safe.
  virtual int open(const char* path, int flags) noexcept = 0;
  virtual int close(int fd) noexcept = 0;
  virtual int ioctl(int fd, unsigned long request, void* data) noexcept = 0;
  // Maps memory that is shared, readable and writable. Returns 0 or the negative errno.
  virtual int map(int fd, std::size_t bytes, std::uint32_t offset, void** at) noexcept = 0;
  virtual int unmap(void* at, std::size_t bytes) noexcept = 0;

  // These functions access a device register in memory that map() has mapped.
  virtual std::uint32_t load(const volatile std::uint32_t* at) noexcept = 0;
  virtual void store(volatile std::uint32_t* at, std::uint32_t value) noexcept = 0;
  // Makes earlier stores by the CPU visible to the GPU, and earlier stores by the GPU visible to
  // the CPU.
  virtual void barrier() noexcept = 0;

  virtual std::chrono::nanoseconds now() noexcept = 0;  // monotonic clock
  virtual void pause(std::chrono::nanoseconds time) noexcept = 0;
};

// Returns the implementation for Linux. The object is never destroyed.
Os& linuxOs();

}  // namespace qpu::runtime

#endif
