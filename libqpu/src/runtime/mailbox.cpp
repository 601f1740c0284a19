#include "runtime/mailbox.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>

#include "error_facts.hpp"
#include "runtime/obstacles.hpp"

namespace qpu::runtime {
namespace {

constexpr std::uint32_t kReplied = 0x80000000;

// Returns the position of the reply's last word among the values, counted from 1.
std::size_t replyWords(std::uint32_t tag) {
  switch (tag) {
    case tag::kArmMemory:
    case tag::kVcMemory:
    case tag::kTemperature:
    case tag::kClockRate:
    case tag::kMeasuredClockRate: return 2;
    default: return 1;
  }
}

}  // namespace

Message::Message(std::uint32_t tag, std::initializer_list<std::uint32_t> request,
                 std::size_t reply) noexcept {
  const std::size_t values = std::min(std::max(request.size(), reply), kMostValues);
  words[0] = static_cast<std::uint32_t>(4 * (6 + values));
  words[2] = tag;
  words[3] = static_cast<std::uint32_t>(4 * values);
  words[4] = static_cast<std::uint32_t>(4 * request.size());
  std::copy(request.begin(), request.end(), words.begin() + 5);
}

bool Message::succeeded(std::size_t reply) const noexcept {
  return words[1] == kReplied && (words[4] & kReplied) != 0 &&
         (words[4] & ~kReplied) >= 4 * reply;
}

int exchange(Os& os, int fd, Message& message) noexcept {
  return os.ioctl(fd, propertyRequest(sizeof(void*)), message.words.data());
}

Mailbox::Mailbox(Os& os) : os_(os), fd_(os.open(kVcio, O_RDWR)) {
  if (fd_ < 0) raiseObstacle(cannotOpen(kVcio, -fd_));
}

Mailbox::~Mailbox() { (void)os_.close(fd_); }

namespace {

// Returns 0, or -ETIMEDOUT if the ioctl returned this error. Throws BackendError for all other
// errors.
int send(Os& os, int fd, Message& message, std::size_t reply) {
  const std::uint32_t tag = message.words[2];
  const int result = exchange(os, fd, message);
  if (result == -ETIMEDOUT) return result;
  if (result < 0) raiseObstacle(mailboxFails(tag, -result));
  if (!message.succeeded(reply)) raiseObstacle(tagRefused(tag, message.words[1]));
  return 0;
}

}  // namespace

std::uint32_t Mailbox::query(std::uint32_t tag, std::initializer_list<std::uint32_t> request) {
  const std::size_t reply = replyWords(tag);
  Message m(tag, request, reply);
  if (send(os_, fd_, m, reply) < 0) raiseObstacle(mailboxFails(tag, ETIMEDOUT));
  return m.value(reply - 1);
}

Mailbox::Memory Mailbox::vcMemory() {
  Message m(tag::kVcMemory, {}, 2);
  if (send(os_, fd_, m, 2) < 0) raiseObstacle(mailboxFails(tag::kVcMemory, ETIMEDOUT));
  return {m.value(0), m.value(1)};
}

std::uint32_t Mailbox::clockRate(std::uint32_t clock) { return query(tag::kClockRate, {clock}); }

std::uint32_t Mailbox::allocate(std::uint32_t bytes, std::uint32_t alignment,
                                std::uint32_t flags) {
  return query(tag::kAllocate, {bytes, alignment, flags});
}

std::uint32_t Mailbox::lock(std::uint32_t handle) { return query(tag::kLock, {handle}); }
bool Mailbox::unlock(std::uint32_t handle) { return query(tag::kUnlock, {handle}) == 0; }
bool Mailbox::release(std::uint32_t handle) { return query(tag::kRelease, {handle}) == 0; }
bool Mailbox::enableQpus(bool on) { return query(tag::kEnableQpu, {on ? 1U : 0U}) == 0; }

Mailbox::Outcome Mailbox::executeQpus(std::uint32_t programs, std::uint32_t control, bool flushed,
                                      std::uint32_t limitMs) {
  Message m(tag::kExecuteQpu, {programs, control, flushed ? 1U : 0U, limitMs}, 1);
  if (send(os_, fd_, m, 1) < 0) return Outcome::KernelGaveUp;
  return m.value(0) == 0 ? Outcome::Done : Outcome::TimedOut;
}

}  // namespace qpu::runtime
