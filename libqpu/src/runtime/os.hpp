// What the runtime asks of the operating system where the hardware is
// concerned. Tests put a double in its place; nothing else of the runtime knows
// whether the VideoCore behind it is real.
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

  // The system calls of these names; a failure is the negative errno. close()
  // and ioctl() may be called from a signal handler.
  virtual int open(const char* path, int flags) noexcept = 0;
  virtual int close(int fd) noexcept = 0;
  virtual int ioctl(int fd, unsigned long request, void* data) noexcept = 0;
  // Shared, readable and writable; 0 or the negative errno.
  virtual int map(int fd, std::size_t bytes, std::uint32_t offset, void** at) noexcept = 0;
  virtual int unmap(void* at, std::size_t bytes) noexcept = 0;

  // A device register in such a mapping.
  virtual std::uint32_t load(const volatile std::uint32_t* at) noexcept = 0;
  virtual void store(volatile std::uint32_t* at, std::uint32_t value) noexcept = 0;
  // What was stored to memory before is there for the GPU, and the other way.
  virtual void barrier() noexcept = 0;

  virtual std::chrono::nanoseconds now() noexcept = 0;  // monotonic
  virtual void pause(std::chrono::nanoseconds time) noexcept = 0;
};

// The one below all this. Never destroyed.
Os& linuxOs();

}  // namespace qpu::runtime

#endif
