#include "runtime/os.hpp"

#include <atomic>
#include <cerrno>
#include <ctime>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace qpu::runtime {
namespace {

class Linux final : public Os {
 public:
  int open(const char* path, int flags) noexcept override {
    const int fd = ::open(path, flags | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
  }
  int close(int fd) noexcept override { return ::close(fd) < 0 ? -errno : 0; }
  int ioctl(int fd, unsigned long request, void* data) noexcept override {
    return ::ioctl(fd, request, data) < 0 ? -errno : 0;
  }
  int map(int fd, std::size_t bytes, std::uint32_t offset, void** at) noexcept override {
    void* const address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                                 static_cast<off_t>(offset));
    if (address == MAP_FAILED) return -errno;
    *at = address;
    return 0;
  }
  int unmap(void* at, std::size_t bytes) noexcept override {
    return ::munmap(at, bytes) < 0 ? -errno : 0;
  }

  std::uint32_t load(const volatile std::uint32_t* at) noexcept override { return *at; }
  void store(volatile std::uint32_t* at, std::uint32_t value) noexcept override { *at = value; }
  void barrier() noexcept override {
    // A C++ fence would not be sufficient, because it orders accesses only between the CPUs in the
    // inner shareable domain, which does not include the GPU.
#if defined(__aarch64__) || (defined(__arm__) && defined(__ARM_ARCH) && __ARM_ARCH >= 7)
    __asm__ volatile("dsb sy" ::: "memory");
#elif defined(__arm__) && !defined(__thumb__)
    __asm__ volatile("mcr p15, 0, %0, c7, c10, 4" ::"r"(0) : "memory");
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  }

  std::chrono::nanoseconds now() noexcept override {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
  void pause(std::chrono::nanoseconds time) noexcept override {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
    timespec t{};
    t.tv_sec = static_cast<decltype(t.tv_sec)>(seconds.count());
    t.tv_nsec = static_cast<decltype(t.tv_nsec)>((time - seconds).count());
    (void)::nanosleep(&t, nullptr);  // a signal may end the wait early, which is harmless
  }
};

}  // namespace

Os& linuxOs() {
  static Os* const os = new Linux;
  return *os;
}

}  // namespace qpu::runtime
