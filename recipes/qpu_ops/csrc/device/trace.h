// Device statistics. Counters are always active. On request, each launch, copy and fallback is
// also recorded with its times. This file does not depend on torch.
#ifndef TORCH_QPU_TRACE_H
#define TORCH_QPU_TRACE_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace torch_qpu {

enum class Kind : std::uint8_t { launch, copy, fallback };

struct Event {
  Kind kind;
  std::string name;
  std::int64_t thread;  // the thread's ID in the operating system
  std::int64_t start_ns;  // on the monotonic clock
  std::int64_t duration_ns;
  std::int64_t bytes;  // number of bytes that were read and written
  std::int64_t clocks;  // V3D clocks in the emulator's model; -1 without the emulator
};

// Measures the time from construction to destruction, even if an exception is thrown in between.
class Span {
 public:
  Span(Kind kind, std::string name, std::size_t bytes = 0);
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  ~Span();

 private:
  Kind kind_;
  std::string name_;
  std::size_t bytes_;
  std::int64_t start_ns_ = 0;
  std::uint64_t clocks_ = 0;
};

struct Count {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;
};
std::map<std::string, Count> counts(Kind kind);
void reset_counts();

// These functions are called before and after a fork, so that the child does not start with a
// lock that is never released.
void lock_counts();
void unlock_counts();

// Returns the total time in nanoseconds that this thread's launches have taken so far. With the
// emulator, this is the time in the emulator's board model. Otherwise, it is the time for which the
// thread waited for the launches.
std::int64_t launched_ns();

// The record is available until the next call of start_record().
void start_record();
std::vector<Event> stop_record();

}  // namespace torch_qpu

#endif
