#include "trace.h"

#include <qpu.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

namespace torch_qpu {
namespace {

struct Record {
  std::mutex mutex;
  std::array<std::map<std::string, Count>, 3> counts;
  std::vector<Event> events;

  static Record& instance() {
    // The object is never destroyed, because threads may outlive static objects.
    static auto* const record = new Record;
    return *record;
  }
};

std::atomic<bool> recording{false};

thread_local std::int64_t waited_ns = 0;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Returns the totals of this thread's runs on the emulator so far, or zeros if there were no runs.
qpu_cycles emulated() {
  qpu_cycles work{};
  return qpu_thread_cycles(&work) == 0 ? work : qpu_cycles{};
}

}  // namespace

Span::Span(Kind kind, std::string name, std::size_t bytes)
    : kind_(kind), name_(std::move(name)), bytes_(bytes) {
  if (!recording && kind_ != Kind::launch) return;
  clocks_ = emulated().clocks;
  start_ns_ = now_ns();
}

Span::~Span() {
  const std::int64_t end = now_ns();
  if (kind_ == Kind::launch) waited_ns += end - start_ns_;
  Record& record = Record::instance();
  const std::lock_guard<std::mutex> lock(record.mutex);
  Count& count = record.counts.at(static_cast<std::size_t>(kind_))[name_];
  ++count.calls;
  count.bytes += static_cast<std::int64_t>(bytes_);
  if (!recording || start_ns_ == 0) return;
  const std::uint64_t clocks = emulated().clocks - clocks_;
  record.events.push_back({kind_, std::move(name_), syscall(SYS_gettid), start_ns_,
                           end - start_ns_, static_cast<std::int64_t>(bytes_),
                           clocks == 0 ? -1 : static_cast<std::int64_t>(clocks)});
}

std::map<std::string, Count> counts(Kind kind) {
  Record& record = Record::instance();
  const std::lock_guard<std::mutex> lock(record.mutex);
  return record.counts.at(static_cast<std::size_t>(kind));
}

void reset_counts() {
  Record& record = Record::instance();
  const std::lock_guard<std::mutex> lock(record.mutex);
  for (auto& kind : record.counts) kind.clear();
}

std::int64_t launched_ns() {
  const qpu_cycles work = emulated();
  return work.clocks != 0 ? static_cast<std::int64_t>(work.seconds * 1e9) : waited_ns;
}

void lock_counts() { Record::instance().mutex.lock(); }
void unlock_counts() { Record::instance().mutex.unlock(); }

void start_record() {
  Record& record = Record::instance();
  const std::lock_guard<std::mutex> lock(record.mutex);
  record.events.clear();
  recording = true;
}

std::vector<Event> stop_record() {
  Record& record = Record::instance();
  const std::lock_guard<std::mutex> lock(record.mutex);
  recording = false;
  return record.events;
}

}  // namespace torch_qpu
