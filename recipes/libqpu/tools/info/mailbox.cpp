#include "tools/info/mailbox.hpp"

#include <cerrno>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <system_error>
#include <unistd.h>

namespace qpu::info {
namespace {

constexpr std::uint32_t kGetVcMemory = 0x00010006;
constexpr std::uint32_t kSuccess = 0x80000000;
constexpr std::uint32_t kReplied = 0x80000000;
constexpr std::uint32_t kValueBytes = 8;  // base, size

// The size in the number is that of a pointer, so it differs between 32- and
// 64-bit programs.
constexpr auto kProperty = _IOWR(100, 0, char*);

std::string reason(const std::string& what) {
  return what + ": " + std::generic_category().message(errno);
}

}  // namespace

VcMemoryMessage vcMemoryRequest() {
  return {sizeof(VcMemoryMessage), 0, kGetVcMemory, kValueBytes, 0, 0, 0, 0};
}

std::optional<std::uint32_t> vcMemorySize(const VcMemoryMessage& reply) {
  if (reply[1] != kSuccess || reply[2] != kGetVcMemory) return std::nullopt;
  if (reply[4] != (kReplied | kValueBytes)) return std::nullopt;
  return reply[6];
}

std::optional<std::uint32_t> askVcMemory(const std::string& path, std::string& fault) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    fault = reason("cannot open " + path);
    return std::nullopt;
  }
  alignas(16) VcMemoryMessage message = vcMemoryRequest();
  const int answer = ioctl(fd, kProperty, message.data());
  if (answer < 0) fault = reason("firmware does not answer through " + path);
  (void)close(fd);
  if (answer < 0) return std::nullopt;
  const auto size = vcMemorySize(message);
  if (!size) fault = "firmware refused the question for its memory";
  return size;
}

}  // namespace qpu::info
