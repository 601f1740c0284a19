#include "runtime/device.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "error_facts.hpp"
#include "runtime/obstacles.hpp"
#include "runtime/round_trip.hpp"

namespace qpu::runtime {
namespace {

constexpr const char* kDevMem = "/dev/mem";
constexpr std::uint32_t kPage = 4096;

// Flags for the allocation of GPU memory. On boards whose CPU bypasses the VideoCore's L2 cache,
// GPU memory must not be cached in L2. On other boards, GPU memory is cached in L2. These flags
// have not been confirmed on hardware. The round-trip test determines whether the flags are right.
constexpr std::uint32_t kDirect = 0x4;
constexpr std::uint32_t kL1NonAllocating = 0xc;

std::uint32_t flagsFor(const Board& board) {
  return board.socName == "BCM2835" ? kL1NonAllocating : kDirect;
}

constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kPause = std::chrono::microseconds(20);
// The maximum time for which a process waits for programs that it cannot stop. It waits when it
// terminates, and after a launch has exceeded its time limit.
constexpr auto kLastWait = std::chrono::milliseconds(500);

std::string seconds(std::chrono::nanoseconds time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(time).count()) +
         " ms";
}

}  // namespace

std::chrono::milliseconds launchLimit() {
  constexpr long kDefault = 10000;
  const char* const set = std::getenv("QPU_TIMEOUT_MS");  // NOLINT(concurrency-mt-unsafe)
  if (set == nullptr || *set == '\0') return std::chrono::milliseconds(kDefault);
  char* end = nullptr;
  const long value = std::strtol(set, &end, 10);
  if (*end != '\0' || value < 1 || value > 3600000)
    detail::raise<BackendError>("QPU_TIMEOUT_MS=" + std::string(set) +
                                ": expected milliseconds, 1..3600000");
  return std::chrono::milliseconds(value);
}

GpuMemory::~GpuMemory() { device_->release(*this); }

std::shared_ptr<Device> Device::open(const Host& host) {
  return std::shared_ptr<Device>(new Device(host));
}

Device::Device(const Host& host)
    : os_(*host.os),
      board_(readBoard(host.root)),
      system_(readSystem(host.root, host.os)),
      self_(Process::current()),
      memoryFlags_(flagsFor(board_)) {
  if (const auto found = obstacles(board_, system_); !found.empty()) raiseObstacle(found.front());
  mailbox_ = std::make_unique<Mailbox>(os_);
  memory_ = os_.open(kDevMem, O_RDWR | O_SYNC);
  if (memory_ < 0) raiseObstacle(cannotOpen(kDevMem, -memory_));
  try {
    state_ = std::make_unique<State>(stateFolder());
    mapRegisters(peripheralBase(host.root));
    {
      // While this process holds the launch lock, no other process is waiting for its programs.
      // Only programs that a process left running when it was killed, or when it exceeded its time
      // limit, can be running.
      const State::LaunchLock alone(*state_);
      const State::Lock lock(*state_);
      recover();
      enable();
    }
    checkRegisters();
  } catch (...) {
    close();
    (void)os_.close(memory_);
    throw;
  }
}

Device::~Device() {
  close();
  v3d_.reset();
  (void)os_.close(memory_);
}

// The caller must hold both locks of the state.
void Device::recover() {
  std::size_t dead = 0;
  std::size_t pieces = 0;
  std::uint64_t bytes = 0;
  bool held = false;
  std::vector<State::Entry> ended;
  for (const State::Entry& e : state_->entries()) {
    const bool holder = e.record.kind == Record::Kind::Holder;
    if (!e.record.process.alive()) {
      ended.push_back(e);
      if (holder) ++dead;
    } else if (holder) {
      held = true;
    }
  }
  // A process that was killed may have left programs running, which could write to memory that is
  // released here. Enabling the QPUs enables them for all processes, so the QPUs are disabled only
  // if no other process uses them. If programs are still running, a process that starts later
  // releases the memory.
  if (!held && dead != 0) (void)mailbox_->enableQpus(false);
  const bool running = held && v3d_ && v3d_->powered() && !v3d_->finished();
  for (const State::Entry& e : ended) {
    if (e.record.kind == Record::Kind::Holder) {
      state_->clear(e.index);
    } else if (!running) {
      // Clear the record before the handle is released. If this process is interrupted between the
      // two steps, the memory is never released, which only wastes memory. In the opposite order,
      // the handle could be released twice, and the second release could affect another program's
      // memory.
      state_->clear(e.index);
      (void)mailbox_->unlock(e.record.handle);
      (void)mailbox_->release(e.record.handle);
      ++pieces;
      bytes += e.record.bytes;
    }
  }
  if (dead != 0 || pieces != 0)
    note_ = "released resources of " + std::to_string(dead) + " ended processes: " +
            std::to_string(pieces) + " allocations of GPU memory, " + std::to_string(bytes) +
            " bytes";
}

// The caller must hold the lock of the state.
void Device::enable() {
  // Write the record before the QPUs are enabled. Without a record, no process would disable them.
  Record record;
  record.kind = Record::Kind::Holder;
  record.process = self_;
  const std::size_t index = state_->add(record);
  try {
    if (!state_->othersHold(self_)) {
      if (!mailbox_->enableQpus(true)) raiseObstacle(enableRefused(system_));
      clearQueue();
    }
  } catch (...) {
    state_->clear(index);
    throw;
  }
  holder_ = index;
}

void Device::mapRegisters(std::uint32_t peripherals) {
  try {
    v3d_ = std::make_unique<V3d>(os_, memory_, peripherals);
  } catch (const BackendError& e) {
    faults_[0] = e.what();
  }
}

void Device::checkRegisters() {
  if (!v3d_) return;
  try {
    v3d_->requirePower();
    v3d_->requireIdle();
  } catch (const BackendError& e) {
    faults_[0] = e.what();
  }
}

const std::string& Device::fault(Method method) {
  const std::lock_guard<std::mutex> lock(faultMutex_);
  auto& fault = faults_.at(static_cast<std::size_t>(method));
  if (!fault) {
    try {
      roundTrip(*this, method);
      fault.emplace();
    } catch (const Error& e) {
      fault = e.what();
    }
  }
  return *fault;
}

std::uint32_t Device::clockHz() {
  const std::lock_guard<std::mutex> lock(mutex_);
  requireOpen();
  return mailbox_->clockRate(kV3dClock);
}

std::pair<std::uint32_t, std::uint32_t> Device::identity() {
  requireOpen();
  if (const std::string& f = fault(Method::Registers); !f.empty())
    detail::raise<BackendError>(f);
  return {v3d_->read(v3d::kIdent0), v3d_->read(v3d::kIdent1)};
}

void Device::requireOpen() const {
  if (static_cast<std::uint32_t>(getpid()) != self_.pid)
    detail::raise<BackendError>(
        "the QPUs were opened by process " + std::to_string(self_.pid) +
        ", and this process is a fork of it; start a new process (exec, or 'spawn' in Python), or "
        "set QPU_BACKEND=interpreter in this one");
  if (stuck_)
    detail::raise<BackendError>(
        "a kernel that did not finish could not be stopped; end all processes that use the QPUs "
        "(qpu-info lists them), or reboot");
  if (closed_) detail::raise<BackendError>("the QPUs are disabled because the process is exiting");
}

std::unique_ptr<GpuMemory> Device::allocate(std::uint32_t bytes, const std::string& purpose) {
  if (bytes > UINT32_MAX - kPage)
    detail::raise<AllocationError>(purpose + text(outOfGpuMemory(bytes, system_)));
  const std::uint32_t whole = (bytes + kPage - 1) / kPage * kPage;
  const std::lock_guard<std::mutex> lock(mutex_);
  requireOpen();
  auto* const slot = std::find_if(slots_.begin(), slots_.end(),
                                  [](const Slot& s) { return s.load() == 0; });
  if (slot == slots_.end())
    detail::raise<AllocationError>(purpose + std::to_string(kMostAllocations) +
                                   " allocations of GPU memory are live; release some");

  const std::uint32_t handle = mailbox_->allocate(whole, kPage, memoryFlags_);
  if (handle == 0)
    detail::raise<AllocationError>(purpose + text(outOfGpuMemory(whole, system_)));
  std::size_t index = 0;
  try {
    const State::Lock locked(*state_);
    Record record;
    record.kind = Record::Kind::Memory;
    record.handle = handle;
    record.process = self_;
    record.bytes = whole;
    index = state_->add(record);
  } catch (...) {
    (void)mailbox_->release(handle);
    throw;
  }
  *slot = static_cast<std::uint64_t>(index + 1) << 32U | handle;
  const auto number = static_cast<std::size_t>(slot - slots_.begin());

  const std::uint32_t bus = mailbox_->lock(handle);
  if (bus == 0) {
    releaseSlot(number);
    detail::raise<AllocationError>(purpose + text(outOfGpuMemory(whole, system_)));
  }
  void* at = nullptr;
  const std::uint32_t physical = bus & kPhysicalMask;
  if (const int failed = os_.map(memory_, whole, physical, &at); failed < 0) {
    releaseSlot(number);
    raiseObstacle(cannotMap("GPU memory at " + detail::hex(physical), -failed));
  }
  return std::make_unique<GpuMemory>(shared_from_this(), number, bus, whole,
                                     static_cast<unsigned char*>(at));
}

void Device::release(const GpuMemory& memory) noexcept {
  if (static_cast<std::uint32_t>(getpid()) == self_.pid) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // A program that could not be stopped may still access the memory, so only close() releases it.
    if (!closed_ && !stuck_) releaseSlot(memory.slot_);
  }
  (void)os_.unmap(memory.host_, memory.bytes_);
}

void Device::releaseSlot(std::size_t slot) noexcept {
  const std::uint64_t held = slots_[slot].exchange(0);
  if (held == 0 || held == kKept) return;
  const auto handle = static_cast<std::uint32_t>(held);
  state_->clear(static_cast<std::size_t>(held >> 32U) - 1);
  Message unlock(tag::kUnlock, {handle}, 1);
  (void)exchange(os_, mailbox_->descriptor(), unlock);
  Message release(tag::kRelease, {handle}, 1);
  (void)exchange(os_, mailbox_->descriptor(), release);
}

void Device::close() noexcept {
  if (static_cast<std::uint32_t>(getpid()) != self_.pid || !state_ || closed_.exchange(true))
    return;
  // If this process cannot acquire the lock, the file stays unchanged, and the next process cleans
  // up.
  const bool locked = state_->tryLock();
  const bool others = !locked || state_->othersHold(self_);
  bool stopped = !launching_ && !stuck_;
  if (holder_ && !others) {
    Message off(tag::kEnableQpu, {0}, 1);
    stopped = exchange(os_, mailbox_->descriptor(), off) == 0 || stopped;
  } else if (launching_) {
    waitForQueue();
    stopped = !launching_ && !stuck_;
  }
  // Do not release memory that running programs use, because the firmware could allocate it to
  // another program.
  if (stopped)
    for (std::size_t i = 0; i < slots_.size(); ++i) releaseSlot(i);
  if (holder_ && locked) state_->clear(*holder_);
  if (locked) state_->unlock();
}

// Waits for this process's programs. If they finish, launching_ is false afterwards.
// Assumption: V3D also counts programs that the firmware launches.
void Device::waitForQueue() noexcept {
  const auto end = os_.now() + kLastWait;
  while (launching_ && os_.now() < end) {
    if (v3d_ && v3d_->powered() && v3d_->finished()) launching_ = false;
    os_.pause(kPause);
  }
}

void Device::launch(Method method, const std::vector<Start>& starts, const GpuMemory& control,
                    std::uint32_t controlOffset, const std::string& kernel,
                    std::optional<std::chrono::milliseconds> testLimit) {
  const std::lock_guard<std::mutex> one(launchMutex_);
  requireOpen();
  if (method == Method::Registers && !v3d_)
    detail::raise<BackendError>("V3D's registers are not mapped");
  const auto limit = testLimit ? *testLimit : launchLimit();
  const State::LaunchLock alone(*state_);
  if (method == Method::Registers) waitForOthers(kernel);
  test_ = testLimit ? &control : nullptr;
  launching_ = true;
  try {
    requireOpen();  // exit() may have called close() since the first check
    os_.barrier();
    if (method == Method::Registers)
      launchByRegisters(starts, kernel, limit);
    else
      launchByMailbox(starts, control, controlOffset, kernel, limit);
    os_.barrier();
  } catch (...) {
    launching_ = false;
    throw;
  }
  launching_ = false;
}

// Waits for programs that another process left running when it was killed, or when it exceeded its
// time limit. Without this wait, V3D would count these programs as programs of the next launch.
// Programs that do not finish are stopped if no other process uses the QPUs. Test launches have the
// same limit, because the failure of a test launch disables the launch method for this process.
void Device::waitForOthers(const std::string& kernel) {
  v3d_->requirePower();
  v3d_->requireIdle();
  if (v3d_->finished()) return;
  const auto limit = launchLimit();
  const auto end = os_.now() + limit;
  while (!v3d_->finished() && os_.now() < end) {
    os_.pause(kPause);
    requireOpen();
  }
  if (v3d_->finished()) return;
  const std::string state = v3d_->state();
  const std::string outcome = afterTimeOut();
  if (v3d_->powered() && v3d_->finished()) return;
  detail::raise<ExecutionError>("kernel '" + kernel +
                                    "' was not started, because programs of another process did "
                                    "not finish within " +
                                    seconds(limit) + " (" + state + "); " + outcome,
                                {kernel, "", -1, 0});
}

// Clears the counts of programs. No programs may be running. If the counts of stopped programs
// remained, later launches would wait for these programs.
void Device::clearQueue() {
  if (v3d_ && v3d_->powered()) v3d_->write(v3d::kQueue, v3d::kClearQueue);
}

void Device::raiseOverflow(const std::string& kernel) {
  const std::string state = v3d_->state();
  waitForQueue();
  clearQueue();
  detail::raise<ExecutionError>("kernel '" + kernel + "': V3D's queue overflowed (" + state +
                                    "); another program is launching kernels: end that program",
                                {kernel, "", -1, 0});
}

void Device::launchByRegisters(const std::vector<Start>& starts, const std::string& kernel,
                               std::chrono::milliseconds limit) {
  v3d_->write(v3d::kDebugConfig, 0);
  v3d_->write(v3d::kInterruptEnable, 0);
  v3d_->write(v3d::kInterruptLatch, UINT32_MAX);
  v3d_->write(v3d::kL2Control, v3d::kClearL2);
  v3d_->write(v3d::kSliceCaches, v3d::kClearSlices);
  v3d_->write(v3d::kQueue, v3d::kClearQueue);
  for (const Start& s : starts) {
    v3d_->write(v3d::kUniforms, s.uniforms);
    v3d_->write(v3d::kProgram, s.code);
  }

  const auto began = os_.now();
  for (;;) {
    const std::uint32_t queue = v3d_->read(v3d::kQueue);
    if ((queue & v3d::kQueueError) != 0) raiseOverflow(kernel);
    if ((queue >> 16U & 0xffU) == starts.size()) return;
    const auto taken = os_.now() - began;
    if (taken > limit) break;
    if (taken > kSpin) os_.pause(kPause);
  }
  const std::string state = v3d_->state();
  detail::raise<ExecutionError>("kernel '" + kernel + "' did not finish within " + seconds(limit) +
                                    " (" + state + "); " + afterTimeOut() +
                                    ". If the kernel needs more time, raise QPU_TIMEOUT_MS",
                                {kernel, "", -1, 0});
}

void Device::launchByMailbox(const std::vector<Start>& starts, const GpuMemory& control,
                             std::uint32_t offset, const std::string& kernel,
                             std::chrono::milliseconds limit) {
  auto* const words = reinterpret_cast<volatile std::uint32_t*>(control.host() + offset);
  for (std::size_t i = 0; i < starts.size(); ++i) {
    words[2 * i] = starts[i].uniforms;
    words[2 * i + 1] = starts[i].code;
  }
  os_.barrier();
  const auto began = os_.now();
  // The firmware clears the caches in this call.
  const Mailbox::Outcome outcome =
      mailbox_->executeQpus(static_cast<std::uint32_t>(starts.size()), control.bus() + offset,
                            false, static_cast<std::uint32_t>(limit.count()));
  if (outcome == Mailbox::Outcome::Done) return;
  const std::string what = "kernel '" + kernel + "' did not finish within ";
  if (outcome == Mailbox::Outcome::TimedOut)
    detail::raise<ExecutionError>(what + seconds(limit) + ", or did not raise the host interrupt; " +
                                      afterTimeOut() +
                                      ". If the kernel needs more time, raise QPU_TIMEOUT_MS",
                                  {kernel, "", -1, 0});
  detail::raise<ExecutionError>(
      what + seconds(os_.now() - began) +
          ", the limit of this Linux kernel for a mailbox call; " + afterTimeOut() +
          ". Use QPU_BACKEND=vc4-registers, or split the work into calls below 1 s",
      {kernel, "", -1, 0});
}

// Assumption: disabling and then enabling the QPUs stops a program. Test on a board: run a launch
// that exceeds the time limit.
std::string Device::afterTimeOut() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const State::Lock locked(*state_);
  if (state_->othersHold(self_)) {
    // launching_ is false if another process launched the programs. Such programs do not access
    // this process's memory.
    if (launching_) {
      if (v3d_ && v3d_->powered()) waitForQueue();
      if (!launching_) return "it finished later";
      if (test_ != nullptr)
        slots_[test_->slot_] = kKept;
      else
        stuck_ = true;
    }
    return "the QPUs were not disabled, because other processes also use them: end all processes "
           "that use the QPUs (qpu-info lists them), or reboot";
  }
  const auto enable = [this](bool on) {
    try {
      return mailbox_->enableQpus(on);
    } catch (const BackendError&) {
      return false;  // for example, because the firmware did not reply in time
    }
  };
  if (!enable(false) || !enable(true)) {
    stuck_ = true;
    return "disabling and enabling the QPUs failed: reboot";
  }
  clearQueue();
  return "the QPUs were disabled and enabled again";
}

}  // namespace qpu::runtime
