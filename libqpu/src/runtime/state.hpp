// A shared file that records which processes have enabled the QPUs and which GPU memory they own.
// The firmware releases nothing when a process dies. The next process that starts must therefore
// release these resources.
//
// The file consists of a header and records of the same size. Each record has a checksum and is
// written in place with a single write, so that the file is valid even after a crash between two
// writes.
#ifndef QPU_SRC_RUNTIME_STATE_HPP
#define QPU_SRC_RUNTIME_STATE_HPP

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace qpu::runtime {

// Identifies a process, even if its PID has been reused.
struct Process {
  std::uint32_t pid = 0;
  std::uint64_t start = 0;  // clock ticks since boot, field 22 of /proc/PID/stat

  static Process current() noexcept;
  // Zombie processes are treated as dead. The function is async-signal-safe.
  bool alive() const noexcept;
  bool operator==(const Process& o) const { return pid == o.pid && start == o.start; }
};

struct Record {
  enum class Kind : std::uint32_t { Free, Holder, Memory };
  Kind kind = Kind::Free;
  std::uint32_t handle = 0;  // for Kind::Memory
  Process process;
  std::uint32_t bytes = 0;   // for Kind::Memory
};

// Returns the folder in QPU_STATE_DIR. If this variable is not set, returns /run/qpu if this folder
// exists, and /dev/shm otherwise. After a reboot, both folders and the firmware's table of handles
// are empty.
std::string stateFolder();

class State {
 public:
  struct Entry {
    std::size_t index;
    Record record;
  };

  // Creates the files if necessary. Throws BackendError if a file cannot be created.
  explicit State(const std::string& folder);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  // A lock that excludes other processes, but not other threads of this process.
  class Lock {
   public:
    explicit Lock(const State& state);
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    ~Lock();

   private:
    int fd_;
  };
  // A lock that is held while the QPUs run programs, because the hardware does not isolate launches
  // from each other.
  class LaunchLock {
   public:
    explicit LaunchLock(const State& state);
    LaunchLock(const LaunchLock&) = delete;
    LaunchLock& operator=(const LaunchLock&) = delete;
    ~LaunchLock();

   private:
    int fd_;
  };
  // These functions are for signal handlers. tryLock() returns false if another process holds the
  // lock.
  bool tryLock() const noexcept;
  void unlock() const noexcept;

  // Returns all records that are not free. The caller must hold the lock.
  std::vector<Entry> entries() const;
  // The number of unreadable records that were found when the file was opened. The records are now
  // free.
  std::size_t damaged() const { return damaged_; }
  // Throws BackendError if the file cannot be written.
  std::size_t add(const Record& record);

  // These functions are async-signal-safe. clear() does not require the lock if the record
  // belongs to this process.
  void clear(std::size_t index) const noexcept;
  bool othersHold(const Process& self) const noexcept;

 private:
  void initialise();

  std::string path_;
  int file_;
  int launch_ = -1;
  std::size_t damaged_ = 0;
};

// Returns the records in the file, or an empty list if the file does not exist. The function is
// used for reports and opens the file read-only.
std::vector<Record> readState(const std::string& folder);

}  // namespace qpu::runtime

#endif
