// Records, in a shared file, which processes have enabled the QPUs and which GPU memory they own.
// The firmware releases nothing when a process dies, so the next process that starts must release
// it.
//
// The file consists of a header and records of the same size, each with a checksum. Each record
// is written in place by a single write, so that a crash between two writes leaves a valid file.
#ifndef QPU_SRC_RUNTIME_STATE_HPP
#define QPU_SRC_RUNTIME_STATE_HPP

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace qpu::runtime {

// Identifies a process, even if its PID is reused later.
struct Process {
  std::uint32_t pid = 0;
  std::uint64_t start = 0;  // clock ticks since boot, field 22 of /proc/PID/stat

  static Process current() noexcept;
  // Zombies count as dead. Async-signal-safe.
  bool alive() const noexcept;
  bool operator==(const Process& o) const { return pid == o.pid && start == o.start; }
};

struct Record {
  enum class Kind : std::uint32_t { Free, Holder, Memory };
  Kind kind = Kind::Free;
  std::uint32_t handle = 0;  // Memory
  Process process;
  std::uint32_t bytes = 0;   // Memory
};

// QPU_STATE_DIR; by default /run/qpu if it exists, otherwise /dev/shm. Both of these folders,
// like the firmware's table of handles, are empty after a reboot.
std::string stateFolder();

class State {
 public:
  struct Entry {
    std::size_t index;
    Record record;
  };

  // Creates the files if necessary. Throws BackendError.
  explicit State(const std::string& folder);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  // Exclusive between processes, but not between threads.
  class Lock {
   public:
    explicit Lock(const State& state);
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    ~Lock();

   private:
    int fd_;
  };
  // Held while QPUs run programs, because the hardware does not isolate launches.
  class LaunchLock {
   public:
    explicit LaunchLock(const State& state);
    LaunchLock(const LaunchLock&) = delete;
    LaunchLock& operator=(const LaunchLock&) = delete;
    ~LaunchLock();

   private:
    int fd_;
  };
  // For signal handlers. Returns false if another process holds the lock.
  bool tryLock() const noexcept;
  void unlock() const noexcept;

  // All records except free ones. The caller holds the lock.
  std::vector<Entry> entries() const;
  // The number of unreadable records that were found when the file was opened. They are now free.
  std::size_t damaged() const { return damaged_; }
  // Throws BackendError if the file cannot be written.
  std::size_t add(const Record& record);

  // Async-signal-safe. clear() does not require the lock for the process's own records.
  void clear(std::size_t index) const noexcept;
  bool othersHold(const Process& self) const noexcept;

 private:
  void initialise();

  std::string path_;
  int file_;
  int launch_ = -1;
  std::size_t damaged_ = 0;
};

// For reports: the records of the file, or none if it does not exist. Opens the file read-only.
std::vector<Record> readState(const std::string& folder);

}  // namespace qpu::runtime

#endif
