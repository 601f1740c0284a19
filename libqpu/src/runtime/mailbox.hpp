// The firmware's property interface, which is accessed through /dev/vcio. This code has not been
// verified on a board.
#ifndef QPU_SRC_RUNTIME_MAILBOX_HPP
#define QPU_SRC_RUNTIME_MAILBOX_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "runtime/os.hpp"

namespace qpu::runtime {

constexpr const char* kVcio = "/dev/vcio";

namespace tag {
constexpr std::uint32_t kFirmwareRevision = 0x00000001;
constexpr std::uint32_t kBoardModel = 0x00010001;
constexpr std::uint32_t kBoardRevision = 0x00010002;
constexpr std::uint32_t kArmMemory = 0x00010005;
constexpr std::uint32_t kVcMemory = 0x00010006;
constexpr std::uint32_t kTemperature = 0x00030006;
constexpr std::uint32_t kClockRate = 0x00030002;
constexpr std::uint32_t kMeasuredClockRate = 0x00030047;
constexpr std::uint32_t kAllocate = 0x0003000c;
constexpr std::uint32_t kLock = 0x0003000d;
constexpr std::uint32_t kUnlock = 0x0003000e;
constexpr std::uint32_t kRelease = 0x0003000f;
constexpr std::uint32_t kExecuteQpu = 0x00030011;
constexpr std::uint32_t kEnableQpu = 0x00030012;
}  // namespace tag

constexpr std::uint32_t kV3dClock = 5;
// The firmware's response to kExecuteQpu and kEnableQpu if the request fails.
constexpr std::uint32_t kQpuRefused = 0x80000000;

// Returns the number of the property ioctl for programs whose pointers have this size. 32-bit
// programs use a different number from 64-bit programs, even on a 64-bit kernel.
constexpr unsigned long propertyRequest(std::size_t pointerBytes) {
  return 3UL << 30U | static_cast<unsigned long>(pointerBytes) << 16U | 100UL << 8U;
}

// A message with one tag. The message consists of these parts: size, code, tag, size of the values,
// size of the request, values, end mark.
struct Message {
  static constexpr std::size_t kMostValues = 8;

  alignas(16) std::array<std::uint32_t, 6 + kMostValues> words{};

  // Allocates space for the request or the reply, whichever is larger.
  Message(std::uint32_t tag, std::initializer_list<std::uint32_t> request,
          std::size_t replyWords) noexcept;
  bool succeeded(std::size_t replyWords) const noexcept;
  std::uint32_t value(std::size_t i) const noexcept { return words[5 + i]; }
};

// Sends the message. The reply overwrites the message. Returns 0 or the negative errno. The
// function is async-signal-safe.
int exchange(Os& os, int fd, Message& message) noexcept;

class Mailbox {
 public:
  // Throws BackendError with a message that says how to fix the error.
  explicit Mailbox(Os& os);
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  ~Mailbox();

  int descriptor() const { return fd_; }

  // Sends a request and returns the last word of the reply. Throws BackendError if the ioctl
  // fails or the firmware does not support the tag.
  std::uint32_t query(std::uint32_t tag, std::initializer_list<std::uint32_t> request = {});
  struct Memory {
    std::uint32_t base = 0;
    std::uint32_t bytes = 0;
  };
  Memory vcMemory();
  std::uint32_t clockRate(std::uint32_t clock);  // in Hz

  // Returns the handle, or 0 if the firmware has no memory left.
  std::uint32_t allocate(std::uint32_t bytes, std::uint32_t alignment, std::uint32_t flags);
  std::uint32_t lock(std::uint32_t handle);  // returns the bus address, or 0 on failure
  // Both functions return false if the firmware does not recognise the handle.
  bool unlock(std::uint32_t handle);
  bool release(std::uint32_t handle);
  // Returns false if the firmware refuses the request, or if `on` is true and the QPUs are
  // already enabled.
  bool enableQpus(bool on);

  enum class Outcome : std::uint8_t { Done, TimedOut, KernelGaveUp };
  Outcome executeQpus(std::uint32_t programs, std::uint32_t control, bool flushed,
                      std::uint32_t limitMs);

 private:
  Os& os_;
  int fd_;
};

}  // namespace qpu::runtime

#endif
