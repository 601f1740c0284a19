#include "runtime/machine.hpp"

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <optional>

#include "qpu/error.h"

namespace qpu::runtime {
namespace {

struct Machine {
  std::mutex mutex;
  Host host;
  std::optional<Opened> opened;
  std::atomic<unsigned> generation{0};

  Machine() { host.os = &linuxOs(); }
};

Machine& machine() {
  // The object is never destroyed, because it must outlive all static objects.
  static auto* const one = new Machine;
  return *one;
}

// The device that the functions below close when the process ends. The device is not destroyed
// while this pointer refers to it.
std::atomic<Device*> live{nullptr};

constexpr std::array<int, 9> kFatalSignals = {SIGHUP, SIGINT, SIGQUIT, SIGILL, SIGABRT,
                                        SIGBUS, SIGFPE, SIGSEGV, SIGTERM};

void closeLive() {
  if (Device* const device = live.load()) device->close();
}

extern "C" void qpuFatalSignal(int signal) {
  closeLive();
  // SA_RESETHAND has restored the signal's default action. This action takes effect when the
  // handler returns.
  (void)raise(signal);
}

void installHooks() {
  (void)std::atexit(closeLive);
  for (const int signal : kFatalSignals) {
    struct sigaction old {};
    if (sigaction(signal, nullptr, &old) != 0 || (old.sa_flags & SA_SIGINFO) != 0 ||
        old.sa_handler != SIG_DFL)
      continue;
    struct sigaction hook {};
    hook.sa_handler = qpuFatalSignal;
    hook.sa_flags = static_cast<int>(SA_RESETHAND);
    (void)sigemptyset(&hook.sa_mask);
    (void)sigaction(signal, &hook, nullptr);
  }
}

}  // namespace

void closeWhenProcessEnds(const std::shared_ptr<Device>& device) {
  static std::once_flag once;
  live = device.get();
  std::call_once(once, installHooks);
}

const Opened& openDevice() {
  Machine& m = machine();
  const std::lock_guard<std::mutex> lock(m.mutex);
  if (!m.opened) {
    m.opened.emplace();
    try {
      m.opened->device = Device::open(m.host);
      closeWhenProcessEnds(m.opened->device);
    } catch (const Error& e) {
      m.opened->fault = e.what();
    }
  }
  return *m.opened;
}

const Opened* openedDevice() {
  Machine& m = machine();
  const std::lock_guard<std::mutex> lock(m.mutex);
  return m.opened ? &*m.opened : nullptr;
}

Host host() {
  Machine& m = machine();
  const std::lock_guard<std::mutex> lock(m.mutex);
  return m.host;
}

unsigned hostGeneration() { return machine().generation; }

WithHost::WithHost(const Host& host) : before_(runtime::host()) {
  Machine& m = machine();
  const std::lock_guard<std::mutex> lock(m.mutex);
  live = nullptr;
  m.opened.reset();
  m.host = host;
  ++m.generation;
}

WithHost::~WithHost() {
  Machine& m = machine();
  const std::lock_guard<std::mutex> lock(m.mutex);
  live = nullptr;
  m.opened.reset();
  m.host = before_;
  ++m.generation;
}

}  // namespace qpu::runtime
