// Device statistics: counters that are always active and, on request, a record of each launch,
// copy and fallback with its times. Independent of torch.
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
  std::int64_t thread;  // operating system ID
  std::int64_t start_ns;  // monotonic clock
  std::int64_t duration_ns;
  std::int64_t bytes;  // read and written
  std::int64_t clocks;  // V3D clocks in the emulator's model; -1 without the emulator
};

// Counts from construction to destruction, even if an exception is thrown in between.
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

// Taken around a fork, so that a child does not start with a lock that is never released.
void lock_counts();
void unlock_counts();

// The total time of this thread's launches so far, in nanoseconds: with the emulator, according
// to its board model; otherwise, the time spent waiting for the launches.
std::int64_t launched_ns();

// The record remains available until the next start.
void start_record();
std::vector<Event> stop_record();

}  // namespace torch_qpu

#endif
