// Which processes have the QPUs on and which GPU memory is theirs, in a file
// that all of them share: firmware gives nothing back when a process dies, so
// the next one to start does.
//
// The file is a header and records of one size, each with a check word, written
// in place by one write each: a crash between two writes leaves a valid file.
#ifndef QPU_SRC_RUNTIME_STATE_HPP
#define QPU_SRC_RUNTIME_STATE_HPP

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace qpu::runtime {

// A process, told apart from a later one with the same number.
struct Process {
  std::uint32_t pid = 0;
  std::uint64_t start = 0;  // clock ticks since boot, field 22 of /proc/PID/stat

  static Process current() noexcept;
  // Zombies count as dead. May be called from a signal handler.
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

// QPU_STATE_DIR, else /run/qpu where that exists, else /dev/shm: both are empty
// after a reboot, as is the firmware's table of handles.
std::string stateFolder();

class State {
 public:
  struct Entry {
    std::size_t index;
    Record record;
  };

  // Makes the files when there are none. Throws BackendError.
  explicit State(const std::string& folder);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  // Exclusive among processes, not among threads.
  class Lock {
   public:
    explicit Lock(const State& state);
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    ~Lock();

   private:
    int fd_;
  };
  // Held while QPUs run programs, which nothing else protects from each other.
  class LaunchLock {
   public:
    explicit LaunchLock(const State& state);
    LaunchLock(const LaunchLock&) = delete;
    LaunchLock& operator=(const LaunchLock&) = delete;
    ~LaunchLock();

   private:
    int fd_;
  };
  // For signal handlers: false when another process has it.
  bool tryLock() const noexcept;
  void unlock() const noexcept;

  // The caller holds the lock. All but Free ones.
  std::vector<Entry> entries() const;
  // Records that could not be read, since the file was opened; they are free now.
  std::size_t damaged() const { return damaged_; }
  // Throws BackendError when the file cannot be written.
  std::size_t add(const Record& record);

  // These may be called from a signal handler; clear() also without the lock,
  // for one's own records.
  void clear(std::size_t index) const noexcept;
  bool othersHold(const Process& self) const noexcept;

 private:
  void initialise();

  std::string path_;
  int file_;
  int launch_ = -1;
  std::size_t damaged_ = 0;
};

// For reports: what the file says, nothing when there is none. Opens it for
// reading only and changes nothing.
std::vector<Record> readState(const std::string& folder);

}  // namespace qpu::runtime

#endif
