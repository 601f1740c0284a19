#include "runtime/state.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#include "error_facts.hpp"

namespace qpu::runtime {
namespace {

constexpr std::size_t kSlot = 48;  // size in bytes of the header and of each record
constexpr std::array<char, 8> kMagic = {'q', 'p', 'u', 's', 't', 'a', 't', '1'};

using Slot = std::array<unsigned char, kSlot>;

struct Layout {
  std::uint32_t kind;
  std::uint32_t handle;
  std::uint32_t pid;
  std::uint32_t bytes;
  std::uint64_t start;
  std::array<unsigned char, 20> zero;
  std::uint32_t check;  // checksum of all preceding fields
};
static_assert(sizeof(Layout) == kSlot, "one record must fill one slot");
static_assert(offsetof(Layout, start) == 16 && offsetof(Layout, check) == kSlot - 4,
              "32-bit and 64-bit processes share the file, so the layout must not differ");

std::uint32_t checkOf(const unsigned char* bytes, std::size_t count) noexcept {
  std::uint32_t sum = 2166136261U;  // the hash function is FNV-1a
  for (std::size_t i = 0; i < count; ++i) sum = (sum ^ bytes[i]) * 16777619U;
  return sum;
}

Slot pack(const Record& record) noexcept {
  Layout l{};
  l.kind = static_cast<std::uint32_t>(record.kind);
  l.handle = record.handle;
  l.pid = record.process.pid;
  l.bytes = record.bytes;
  l.start = record.process.start;
  Slot slot{};
  std::memcpy(slot.data(), &l, kSlot);
  l.check = checkOf(slot.data(), kSlot - 4);
  std::memcpy(slot.data(), &l, kSlot);
  return slot;
}

bool unpack(const Slot& slot, Record& record) noexcept {
  Layout l{};
  std::memcpy(&l, slot.data(), kSlot);
  if (l.check != checkOf(slot.data(), kSlot - 4) || l.kind > 2) return false;
  record.kind = static_cast<Record::Kind>(l.kind);
  record.handle = l.handle;
  record.process = {l.pid, l.start};
  record.bytes = l.bytes;
  return true;
}

off_t place(std::size_t index) noexcept { return static_cast<off_t>((index + 1) * kSlot); }

// Returns true if a complete slot was read.
bool readSlot(int file, off_t at, Slot& slot) noexcept {
  return pread(file, slot.data(), kSlot, at) == static_cast<ssize_t>(kSlot);
}
bool writeSlot(int file, off_t at, const Slot& slot) noexcept {
  return pwrite(file, slot.data(), kSlot, at) == static_cast<ssize_t>(kSlot);
}

// Returns the header. The header contains the kernel's boot ID, because a reboot makes the handles
// in a file invalid, but the file may survive it.
Slot header() noexcept {
  Slot slot{};
  std::memcpy(slot.data(), kMagic.data(), kMagic.size());
  const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    const ssize_t n = read(fd, slot.data() + kMagic.size(), 36);
    (void)n;  // the boot ID is zero if the kernel does not provide it
    (void)close(fd);
  }
  const std::uint32_t check = checkOf(slot.data(), kSlot - 4);
  std::memcpy(slot.data() + kSlot - 4, &check, 4);
  return slot;
}

// Reads the process's state and start time from /proc/PID/stat. Returns false if the process does
// not exist. The function is async-signal-safe.
bool readStat(std::uint32_t pid, char& state, std::uint64_t& start) noexcept {
  std::array<char, 32> path{};
  char* end = path.data();
  for (const char* c = "/proc/"; *c != '\0'; ++c) *end++ = *c;
  std::array<char, 12> digits{};
  std::size_t n = 0;
  do digits[n++] = static_cast<char>('0' + pid % 10);
  while ((pid /= 10) != 0);
  while (n > 0) *end++ = digits[--n];
  for (const char* c = "/stat"; *c != '\0'; ++c) *end++ = *c;

  const int fd = open(path.data(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  std::array<char, 1024> text{};
  const ssize_t got = read(fd, text.data(), text.size() - 1);
  (void)close(fd);
  // The program's name is in parentheses and can contain any character.
  const char* at = got > 0 ? std::strrchr(text.data(), ')') : nullptr;
  if (at == nullptr || at[1] == '\0') return false;
  at += 2;  // `at` now points to field 3
  state = *at;
  for (int field = 3; field < 22; ++field) {
    at = std::strchr(at, ' ');
    if (at == nullptr) return false;
    ++at;
  }
  start = 0;
  for (; *at >= '0' && *at <= '9'; ++at) start = 10 * start + static_cast<unsigned char>(*at - '0');
  return true;
}

// Returns true if every user can write to the folder, as is the case for /dev/shm. In a
// world-writable folder, only the owner has access to the file. Any other user who could write to
// the file could cause GPU memory to be freed while it is in use.
bool isOpenToAll(const std::string& folder) noexcept {
  struct stat s {};
  return stat(folder.c_str(), &s) == 0 && (s.st_mode & S_IWOTH) != 0;
}

// Throws if another user owns the file. In a folder that every user can write to, another user may
// have created the file.
void requireOwn(int fd, const std::string& path) {
  struct stat s {};
  const uid_t self = geteuid();
  if (fstat(fd, &s) == 0 && s.st_uid == self && S_ISREG(s.st_mode) && s.st_nlink == 1 &&
      fchmod(fd, 0600) == 0)
    return;
  (void)close(fd);
  detail::raise<BackendError>(path + " belongs to user " + std::to_string(s.st_uid) +
                              ", expected user " + std::to_string(self) +
                              ": every user can create files in this folder; remove the file, or "
                              "create /run/qpu for the users of the QPUs: "
                              "install -d -m 2770 -g video /run/qpu");
}

int openShared(const std::string& folder, const char* name) {
  const std::string path = folder + name;
  const bool openToAll = isOpenToAll(folder);
  const mode_t mode = openToAll ? 0600 : 0660;
  // The first attempt does not use O_CREAT. In a sticky folder, the kernel does not allow O_CREAT
  // for a file that belongs to another user.
  for (const int flags : {O_RDWR, O_RDWR | O_CREAT | O_EXCL, O_RDWR}) {
    const int fd = open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode);
    if (fd >= 0) {
      // Override the umask, because root and the folder's group must both be able to use the
      // file.
      if ((flags & O_CREAT) != 0) (void)fchmod(fd, mode);
      if (openToAll) requireOwn(fd, path);
      return fd;
    }
    if (errno != ENOENT && errno != EEXIST) break;
  }
  detail::raise<BackendError>("cannot open " + path +
                              ", which records the processes that use the QPUs: " +
                              std::generic_category().message(errno) +
                              "; set QPU_STATE_DIR to a folder that every user of the QPUs can "
                              "write to");
}

void lockFile(int fd, const std::string& path) {
  while (flock(fd, LOCK_EX) != 0)
    if (errno != EINTR)
      detail::raise<BackendError>("cannot lock " + path + ": " +
                                  std::generic_category().message(errno) +
                                  "; set QPU_STATE_DIR to a folder on a local file system");
}

}  // namespace

Process Process::current() noexcept {
  Process p;
  p.pid = static_cast<std::uint32_t>(getpid());
  char state = '?';
  (void)readStat(p.pid, state, p.start);
  return p;
}

bool Process::alive() const noexcept {
  char state = '?';
  std::uint64_t began = 0;
  if (!readStat(pid, state, began))  // also reached if /proc does not exist
    return start == 0 && (kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM);
  return began == start && state != 'Z' && state != 'X';
}

std::string stateFolder() {
  const char* const set = std::getenv("QPU_STATE_DIR");  // NOLINT(concurrency-mt-unsafe): only read
  if (set != nullptr && *set != '\0') return set;
  struct stat s {};
  return stat("/run/qpu", &s) == 0 && S_ISDIR(s.st_mode) ? "/run/qpu" : "/dev/shm";
}

State::State(const std::string& folder)
    : path_(folder + "/qpu.state"), file_(openShared(folder, "/qpu.state")) {
  try {
    launch_ = openShared(folder, "/qpu.launch");
    const Lock lock(*this);
    initialise();
  } catch (...) {
    (void)close(file_);
    if (launch_ >= 0) (void)close(launch_);
    throw;
  }
}

State::~State() {
  (void)close(file_);
  (void)close(launch_);
}

// The caller must hold the lock.
void State::initialise() {
  const Slot expected = header();
  Slot found{};
  const bool same = readSlot(file_, 0, found) && found == expected;
  if (!same && (ftruncate(file_, 0) != 0 || !writeSlot(file_, 0, expected)))
    detail::raise<BackendError>("cannot write " + path_ + ": " +
                                std::generic_category().message(errno) +
                                "; set QPU_STATE_DIR to a folder with free space");
  struct stat s {};
  if (fstat(file_, &s) != 0) return;
  const std::size_t slots = (static_cast<std::size_t>(s.st_size) + kSlot - 1) / kSlot;
  for (std::size_t i = 0; i + 1 < slots; ++i) {
    Slot slot{};
    Record record;
    if (readSlot(file_, place(i), slot) && unpack(slot, record)) continue;
    ++damaged_;
    clear(i);
  }
}

State::Lock::Lock(const State& state) : fd_(state.file_) { lockFile(fd_, state.path_); }
State::Lock::~Lock() { (void)flock(fd_, LOCK_UN); }
State::LaunchLock::LaunchLock(const State& state) : fd_(state.launch_) {
  lockFile(fd_, state.path_);
}
State::LaunchLock::~LaunchLock() { (void)flock(fd_, LOCK_UN); }

bool State::tryLock() const noexcept { return flock(file_, LOCK_EX | LOCK_NB) == 0; }
void State::unlock() const noexcept { (void)flock(file_, LOCK_UN); }

std::vector<State::Entry> State::entries() const {
  std::vector<Entry> found;
  Slot slot{};
  for (std::size_t i = 0; readSlot(file_, place(i), slot); ++i) {
    Record record;
    if (unpack(slot, record) && record.kind != Record::Kind::Free) found.push_back({i, record});
  }
  return found;
}

std::size_t State::add(const Record& record) {
  std::size_t index = 0;
  Slot slot{};
  for (; readSlot(file_, place(index), slot); ++index) {
    Record old;
    if (!unpack(slot, old) || old.kind == Record::Kind::Free) break;
  }
  if (!writeSlot(file_, place(index), pack(record)))
    detail::raise<BackendError>("cannot write " + path_ + ": " +
                                std::generic_category().message(errno) +
                                "; set QPU_STATE_DIR to a folder with free space");
  return index;
}

void State::clear(std::size_t index) const noexcept {
  (void)writeSlot(file_, place(index), pack(Record()));
}

bool State::othersHold(const Process& self) const noexcept {
  Slot slot{};
  for (std::size_t i = 0; readSlot(file_, place(i), slot); ++i) {
    Record record;
    if (unpack(slot, record) && record.kind == Record::Kind::Holder &&
        !(record.process == self) && record.process.alive())
      return true;
  }
  return false;
}

std::vector<Record> readState(const std::string& folder) {
  std::vector<Record> records;
  const int fd = open((folder + "/qpu.state").c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return records;
  Slot slot{};
  if (readSlot(fd, 0, slot) && slot == header())
    for (std::size_t i = 0; readSlot(fd, place(i), slot); ++i) {
      Record record;
      if (unpack(slot, record) && record.kind != Record::Kind::Free) records.push_back(record);
    }
  (void)close(fd);
  return records;
}

}  // namespace qpu::runtime
