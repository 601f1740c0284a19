// What the device did: counters that are always on, and on request a record of
// each launch, copy and fallback with its times. Nothing of torch here.
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
  std::int64_t thread;  // as the system numbers it
  std::int64_t start_ns;  // of a monotonic clock
  std::int64_t duration_ns;
  std::int64_t bytes;  // read and written
  std::int64_t clocks;  // of V3D by the emulator's model; -1 where there is none
};

// Counts from its start to its end; an exception between them counts too.
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

// Around a fork, so that a child does not begin with a lock that nobody holds.
void lock_counts();
void unlock_counts();

// Nanoseconds that this thread's launches have taken so far: on the emulator by its
// model of a board, else as they were waited for.
std::int64_t launched_ns();

// The record is kept until the next start.
void start_record();
std::vector<Event> stop_record();

}  // namespace torch_qpu

#endif
