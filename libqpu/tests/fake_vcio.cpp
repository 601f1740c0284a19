#include "tests/fake_vcio.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include "emu/emulator.hpp"
#include "qpu/error.h"

namespace test {
namespace {

constexpr int kVcioFd = 1000;
constexpr int kMemFd = 1001;
constexpr std::uint32_t kV3d = FakeVcio::kPeripherals + 0x00c00000;
constexpr std::uint32_t kWindow = 0x1000;

// The number of words in the request and the response of each tag, from the firmware's table.
struct Tag {
  std::uint32_t tag;
  std::uint32_t request;
  std::uint32_t reply;
};
constexpr std::array<Tag, 14> kTags = {{{0x00000001, 0, 1},
                                        {0x00010001, 0, 1},
                                        {0x00010002, 0, 1},
                                        {0x00010005, 0, 2},
                                        {0x00010006, 0, 2},
                                        {0x00030002, 1, 2},
                                        {0x00030006, 1, 2},
                                        {0x00030047, 1, 2},
                                        {0x0003000c, 3, 1},
                                        {0x0003000d, 1, 1},
                                        {0x0003000e, 1, 1},
                                        {0x0003000f, 1, 1},
                                        {0x00030011, 4, 1},
                                        {0x00030012, 1, 1}}};

struct Piece {
  std::uint32_t handle;  // 0 means that the block is free
  std::uint32_t offset;
  std::uint32_t bytes;
  std::uint32_t flags;
  bool locked;
};

std::uint32_t alias(std::uint32_t flags) {
  switch (flags & 0xcU) {
    case 0x4: return 0xc0000000;
    case 0x8: return 0x80000000;
    case 0xc: return 0x40000000;
    default: return 0;
  }
}

std::string hex(std::uint32_t value) {
  std::array<char, 16> text{};
  (void)std::snprintf(text.data(), text.size(), "0x%08x", value);
  return text.data();
}

}  // namespace

struct FakeVcio::Shared {
  pthread_mutex_t mutex;
  int enabled;
  int enables;
  int disables;
  std::uint32_t nextHandle;
  std::uint32_t lastFlags;
  std::uint32_t launches;
  std::uint32_t cacheClears;
  std::uint32_t requested;  // programs in V3D's queue
  std::uint32_t completed;
  bool stopped;  // the QPUs were disabled after the last program was queued
  std::uint32_t code;  // of the program that was queued last
  std::array<Piece, 8192> pieces;
  std::array<char, 2048> complaints;
};

namespace {

class Guard {
 public:
  explicit Guard(FakeVcio::Shared* s) : mutex_(&s->mutex) {
    // A process may have terminated while it held the mutex.
    if (pthread_mutex_lock(mutex_) == EOWNERDEAD) pthread_mutex_consistent(mutex_);
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard() { pthread_mutex_unlock(mutex_); }

 private:
  pthread_mutex_t* mutex_;
};

void* shared(std::size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return at;
}

}  // namespace

FakeVcio::FakeVcio(std::uint32_t gpuBytes)
    : shared_(new (shared(sizeof(Shared))) Shared{}),
      gpuBytes_(gpuBytes),
      memory_(static_cast<unsigned char*>(shared(gpuBytes))),
      registers_(kWindow / 4) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&shared_->mutex, &attributes);
  shared_->nextHandle = 0x11;
}

FakeVcio::~FakeVcio() {
  munmap(memory_, gpuBytes_);
  munmap(shared_, sizeof(Shared));
}

void FakeVcio::complain(const std::string& text) noexcept {
  char* const all = shared_->complaints.data();
  std::strncat(all, (text + "\n").c_str(), shared_->complaints.size() - std::strlen(all) - 1);
}

std::string FakeVcio::complaints() const { return shared_->complaints.data(); }
int FakeVcio::enabled() const { return shared_->enabled; }
int FakeVcio::enables() const { return shared_->enables; }
std::uint32_t FakeVcio::lastFlags() const { return shared_->lastFlags; }
std::uint32_t FakeVcio::launches() const { return shared_->launches; }
std::uint32_t FakeVcio::cacheClears() const { return shared_->cacheClears; }
std::size_t FakeVcio::allocations() const {
  return static_cast<std::size_t>(std::count_if(shared_->pieces.begin(), shared_->pieces.end(),
                                                [](const Piece& p) { return p.handle != 0; }));
}
std::uint32_t FakeVcio::firstHandle() const {
  for (const Piece& p : shared_->pieces)
    if (p.handle != 0) return p.handle;
  return 0;
}

unsigned char* FakeVcio::memory(std::uint32_t bus, std::uint32_t bytes) const {
  return wordsFrom(bus) >= (bytes + 3) / 4 && bytes != 0
             ? memory_ + ((bus & 0x3fffffffU) - kPhysical)
             : nullptr;
}

std::uint32_t FakeVcio::wordsFrom(std::uint32_t bus) const {
  for (const Piece& p : shared_->pieces) {
    if (p.handle == 0 || !p.locked) continue;
    const std::uint32_t offset = bus - (alias(p.flags) | (kPhysical + p.offset));
    if (offset < p.bytes) return (p.bytes - offset) / 4;
  }
  return 0;
}

int FakeVcio::open(const char* path, int flags) noexcept {
  const std::string name = path;
  (void)flags;
  if (name == "/dev/vcio") return openVcioError != 0 ? -openVcioError : (++opened_, kVcioFd);
  if (name == "/dev/mem") return openMemError != 0 ? -openMemError : (++opened_, kMemFd);
  complain("open of " + name);
  return -ENOENT;
}

int FakeVcio::close(int fd) noexcept {
  if (fd != kVcioFd && fd != kMemFd) complain("close of descriptor " + std::to_string(fd));
  return --opened_ < 0 ? -EBADF : 0;
}

int FakeVcio::map(int fd, std::size_t bytes, std::uint32_t offset, void** at) noexcept {
  if (fd != kMemFd) return -EBADF;
  if (offset % 4096 != 0 || bytes % 4096 != 0) {
    complain("map of " + std::to_string(bytes) + " bytes at " + hex(offset));
    return -EINVAL;
  }
  if (offset == kV3d && bytes == kWindow) {
    if (mapRegistersError != 0) return -mapRegistersError;
    *at = registers_.data();
  } else if (offset >= kPhysical && offset - kPhysical + bytes <= gpuBytes_) {
    if (mapMemoryError != 0) return -mapMemoryError;
    *at = memory_ + (offset - kPhysical);
    if (memoryElsewhere) *at = shared(bytes);
  } else {
    complain("map outside of GPU memory and V3D, at " + hex(offset));
    return -EPERM;
  }
  return 0;
}

int FakeVcio::unmap(void* at, std::size_t bytes) noexcept {
  auto* const byte = static_cast<unsigned char*>(at);
  const bool gpu = byte >= memory_ && byte + bytes <= memory_ + gpuBytes_;
  const bool registers = at == registers_.data() && bytes == kWindow;
  if (!gpu && !registers && !memoryElsewhere) complain("unmap of memory that was not mapped");
  return 0;
}

int FakeVcio::ioctl(int fd, unsigned long request, void* data) noexcept {
  if (fd != kVcioFd) return -EBADF;
  // _IOWR(100, 0, char*) contains the size of a pointer. The number is therefore different for
  // 32-bit programs.
  const unsigned long expected = sizeof(void*) == 8 ? 0xc0086400UL : 0xc0046400UL;
  if (request != expected) {
    complain("ioctl number " + hex(static_cast<std::uint32_t>(request)));
    return -ENOTTY;
  }
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) complain("message not at 16 bytes");
  if (ioctlError != 0) return -ioctlError;

  auto* const words = static_cast<std::uint32_t*>(data);
  const auto* const tag = std::find_if(kTags.begin(), kTags.end(),
                                       [words](const Tag& t) { return t.tag == words[2]; });
  if (tag == kTags.end()) {
    complain("tag " + hex(words[2]));
    words[1] = 0x80000001;
    return 0;
  }
  const std::uint32_t room = std::max(tag->request, tag->reply);
  const std::array<std::uint32_t, 5> head = {4 * (6 + room), 0, tag->tag, 4 * room,
                                             4 * tag->request};
  for (std::size_t i = 0; i < head.size(); ++i)
    if (words[i] != head[i])
      complain("tag " + hex(tag->tag) + ": word " + std::to_string(i) + " is " + hex(words[i]) +
               ", expected " + hex(head[i]));
  if (words[5 + room] != 0) complain("tag " + hex(tag->tag) + ": no end");

  if (lacksQpuTags && tag->tag >= 0x00030010 && tag->tag <= 0x00030012) {
    words[1] = 0x80000001;
    return 0;
  }
  if (tag->tag == 0x00030011) {
    bool gaveUp = false;
    const std::uint32_t outcome = execute(words + 5, gaveUp);
    if (gaveUp) return -ETIMEDOUT;
    words[5] = outcome;
  } else {
    answer(words);
  }
  words[1] = 0x80000000;
  words[4] = 0x80000000 | 4 * tag->reply;
  return 0;
}

void FakeVcio::answer(std::uint32_t* words) noexcept {
  const Guard guard(shared_);
  std::uint32_t* const v = words + 5;
  auto& pieces = shared_->pieces;
  const auto byHandle = [&pieces](std::uint32_t handle) {
    return std::find_if(pieces.begin(), pieces.end(), [handle](const Piece& p) {
      return handle != 0 && p.handle == handle;
    });
  };
  switch (words[2]) {
    case 0x00000001: v[0] = 0x5f440c10; break;
    case 0x00010001: v[0] = 0; break;
    case 0x00010002: v[0] = 0xa02082; break;
    case 0x00010005: v[0] = 0; v[1] = kPhysical; break;
    case 0x00010006: v[0] = kPhysical; v[1] = gpuBytes_ < 16U << 20U ? 64U << 20U : gpuBytes_; break;
    case 0x00030002:
    case 0x00030047: v[1] = v[0] == 5 ? 400000000 : 0; break;
    case 0x00030006: v[1] = 47236; break;
    case 0x0003000c: {
      const std::uint32_t bytes = v[0];
      if (v[1] != 4096) complain("alignment " + std::to_string(v[1]));
      std::uint32_t at = 0;  // first-fit allocation
      for (bool moved = true; moved;) {
        moved = false;
        for (const Piece& p : pieces)
          if (p.handle != 0 && at < p.offset + p.bytes && p.offset < at + bytes) {
            at = p.offset + p.bytes;
            moved = true;
          }
      }
      auto* const free = std::find_if(pieces.begin(), pieces.end(),
                                      [](const Piece& p) { return p.handle == 0; });
      shared_->lastFlags = v[2];
      if (bytes == 0 || at + bytes > gpuBytes_ || free == pieces.end()) {
        v[0] = 0;
        break;
      }
      *free = {shared_->nextHandle++, at, bytes, v[2], false};
      v[0] = free->handle;
      break;
    }
    case 0x0003000d: {
      auto* const p = byHandle(v[0]);
      if (p == pieces.end()) complain("lock of handle " + std::to_string(v[0]));
      if (p != pieces.end()) p->locked = true;
      v[0] = p == pieces.end() ? 0 : alias(p->flags) | (kPhysical + p->offset);
      break;
    }
    case 0x0003000e:
    case 0x0003000f: {
      auto* const p = byHandle(v[0]);
      const bool unlock = words[2] == 0x0003000e;
      if (p == pieces.end()) complain("unlock or release of handle " + std::to_string(v[0]));
      if (p != pieces.end() && !unlock && p->locked)
        complain("release of locked handle " + std::to_string(v[0]));
      if (p != pieces.end() && shared_->completed != shared_->requested && !shared_->stopped &&
          shared_->code - (alias(p->flags) | (kPhysical + p->offset)) < p->bytes)
        complain("release of a running program's memory");
      v[0] = p == pieces.end() ? 0x80000000 : 0;
      if (p == pieces.end()) break;
      if (unlock)
        p->locked = false;
      else
        *p = {};
      break;
    }
    case 0x00030012: {
      const bool on = v[0] == 1;
      if (v[0] > 1) complain("enable " + std::to_string(v[0]));
      const bool refused = refusesQpus || (on && stuckAfterTimeOut && shared_->disables > 0) ||
                           (on ? shared_->enabled > 0 : shared_->enabled == 0);
      if (!refused) {
        shared_->enabled += on ? 1 : -1;
        ++(on ? shared_->enables : shared_->disables);
        if (!on) shared_->stopped = true;
        if (!on && !keepsCounts) shared_->requested = shared_->completed = 0;
      } else if (!on) {
        complain("disable of QPUs that are off");
      }
      v[0] = refused ? 0x80000000 : 0;
      break;
    }
    default: break;
  }
}

FakeVcio::Ends FakeVcio::run(const std::vector<Launched>& programs) noexcept {
  if (shared_->enabled == 0) complain("launch while the QPUs are off");
  if (!cachesClear_) complain("launch with stale caches");
  cachesClear_ = false;
  for (const Launched& p : programs) {
    if (wordsFrom(p.code) == 0) complain("code at " + hex(p.code) + ", which is not locked memory");
    if (wordsFrom(p.uniforms) == 0)
      complain("uniforms at " + hex(p.uniforms) + ", which is not locked memory");
    if (p.code % 8 != 0 || p.uniforms % 4 != 0) complain("launch at a wrong alignment");
  }
  shared_->launches += static_cast<std::uint32_t>(programs.size());
  return runs ? runs(programs) : emulate(programs);
}

FakeVcio::Ends FakeVcio::emulate(const std::vector<Launched>& programs) {
  qpu::emu::Launch launch;
  const std::uint32_t code = programs.front().code;
  // The hardware does not receive a program's length, so the count includes all words to the end of
  // the memory. The program ends with its own program end instruction.
  launch.count = wordsFrom(code) / 2;
  std::vector<qpu::isa::Word> words(launch.count);
  std::memcpy(words.data(), memory(code, 8), 8 * launch.count);
  launch.words = words.data();
  launch.codeAddress = code;
  for (const Launched& p : programs) {
    if (p.code != code) complain("different programs in one launch");
    std::vector<std::uint32_t> stream(std::min(wordsFrom(p.uniforms), 1024U));
    std::memcpy(stream.data(), memory(p.uniforms, 4), 4 * stream.size());
    launch.uniforms.push_back(std::move(stream));
  }
  for (const Piece& p : shared_->pieces)
    if (p.handle != 0 && p.locked)
      launch.memory.push_back(
          {alias(p.flags) | (kPhysical + p.offset), p.bytes, memory_ + p.offset});
  std::sort(launch.memory.begin(), launch.memory.end(),
            [](const auto& a, const auto& b) { return a.start < b.start; });
  launch.limit = 10000000;
  try {
    return qpu::emu::run(launch).hostInterrupt ? Ends::Yes : Ends::WithoutInterrupt;
  } catch (const qpu::Error& e) {
    fault = e.what();
    return Ends::Never;
  }
}

std::uint32_t FakeVcio::execute(const std::uint32_t* values, bool& gaveUp) noexcept {
  const std::uint32_t count = values[0];
  const unsigned char* const control = memory(values[1], 8 * count);
  if (count < 1 || count > 12 || control == nullptr) {
    complain("execution of " + std::to_string(count) + " programs with control block " +
             hex(values[1]));
    return 0x80000000;
  }
  if (values[2] == 0) {
    cachesClear_ = true;
    ++shared_->cacheClears;
  }
  std::vector<Launched> programs(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    std::memcpy(&programs[i].uniforms, control + 8 * i, 4);
    std::memcpy(&programs[i].code, control + 8 * i + 4, 4);
  }
  if (run(programs) == Ends::Yes) return 0;
  const std::uint32_t limit = values[3];
  gaveUp = kernelLimitMs != 0 && limit > kernelLimitMs;
  now_ += std::chrono::milliseconds(gaveUp ? kernelLimitMs : limit);
  return 0x80000000;
}

std::uint32_t FakeVcio::load(const volatile std::uint32_t* at) noexcept {
  const auto index = static_cast<std::size_t>(at - registers_.data());
  if (index >= registers_.size()) {
    complain("load from outside of the registers");
    return 0;
  }
  now_ += std::chrono::microseconds(1);
  if (shared_->enabled == 0 || powerless) return unpowered;
  switch (4 * index) {
    case 0x000: return 0x02443356;
    case 0x004: return 0x000 | 12U << 28U | 1U << 24U | 16U << 16U | 2U << 12U | 4U << 8U | 3U << 4U;
    case 0x010: return registers_[index];
    case 0x100: return draws ? 0x20 : 0;
    case 0x104:
    case 0x130:
    case 0xf20: return 0;
    case 0x43c: {
      if (!queued_.empty()) {
        const std::vector<Launched> programs = std::exchange(queued_, {});
        if (run(programs) != Ends::Never)
          shared_->completed += static_cast<std::uint32_t>(programs.size());
      }
      if (programsEnd.count() != 0 && now_ >= programsEnd) shared_->completed = shared_->requested;
      return (shared_->completed & 0xffU) << 16U | (shared_->requested & 0xffU) << 8U |
             (queueOverflows ? 1U << 7U : 0U);
    }
    default: complain("load of register " + hex(static_cast<std::uint32_t>(4 * index))); return 0;
  }
}

void FakeVcio::store(volatile std::uint32_t* at, std::uint32_t value) noexcept {
  const auto index = static_cast<std::size_t>(at - registers_.data());
  if (index >= registers_.size()) {
    complain("store outside of the registers");
    return;
  }
  if (shared_->enabled == 0) complain("store to a V3D without power");
  const auto require = [this, index, value](std::uint32_t expected) {
    if (value != expected)
      complain("register " + hex(static_cast<std::uint32_t>(4 * index)) + " set to " +
               hex(value) + ", expected " + hex(expected));
  };
  switch (4 * index) {
    case 0x010: registers_[index] = value; break;
    case 0x020: require(4); l2Clear_ = true; break;
    case 0x024:
      require(0x0f0f0f0f);
      cachesClear_ = l2Clear_;
      ++shared_->cacheClears;
      break;
    case 0x430:
      queued_.push_back({uniforms_, value});
      ++shared_->requested;
      shared_->stopped = false;
      shared_->code = value;
      if (queued_.size() > 16) complain("more than 16 programs in the queue");
      break;
    case 0x434: uniforms_ = value; break;
    case 0x43c:
      if (shared_->completed != shared_->requested && !shared_->stopped)
        complain("clear of a queue that is in use");
      if ((value & 1U << 16U) != 0) shared_->completed = 0;
      if ((value & 1U << 8U) != 0) shared_->requested = 0;
      if ((value & 1U) != 0) queued_.clear();
      break;
    case 0xe00:
    case 0xe2c: require(0); break;
    case 0xe30: require(UINT32_MAX); break;
    default: complain("store to register " + hex(static_cast<std::uint32_t>(4 * index)));
  }
}

void FakeVcio::barrier() noexcept {}
std::chrono::nanoseconds FakeVcio::now() noexcept { return now_ += std::chrono::nanoseconds(10); }
void FakeVcio::pause(std::chrono::nanoseconds time) noexcept {
  now_ += time;
  if (onPause) std::exchange(onPause, nullptr)();
}

FakeTree::FakeTree(const std::string& soc) {
  std::filesystem::create_directory(folder_.path / "state");
  setenv("QPU_STATE_DIR", state().c_str(), 1);
  const std::string nul(1, '\0');
  file("proc/device-tree/model", "Raspberry Pi of the tests" + nul);
  file("proc/device-tree/compatible", "raspberrypi,some" + nul + "brcm," + soc + nul);
  // The bus address 0x7e000000 is at CPU address 0x3f000000, and the range has 0x01000000 bytes.
  file("proc/device-tree/soc/ranges", std::string("\x7e\0\0\0\x3f\0\0\0\x01\0\0\0", 12));
  file("proc/device-tree/soc/v3d@7ec00000/status", "disabled" + nul);
  file("dev/vcio", "").file("dev/mem", "");
}

FakeTree::~FakeTree() { unsetenv("QPU_STATE_DIR"); }

FakeTree& FakeTree::file(const std::string& path, const std::string& text) {
  folder_.write(path, text);
  return *this;
}

qpu::runtime::Host FakeTree::host(FakeVcio& os) const {
  qpu::runtime::Host host;
  host.os = &os;
  host.root = qpu::runtime::Root(folder_.path);
  return host;
}

}  // namespace test
