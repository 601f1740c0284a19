// Timing for torch.profiler: the total duration of the launches between two events.
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <memory>

#include "trace.h"

namespace torch_qpu {
namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

// An event records the total time that this thread's launches have taken so far.
struct Stubs final : public torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event,
              std::int64_t* cpu_ns) const override {
    if (device != nullptr) *device = 0;
    *event = std::make_shared<std::int64_t>(launched_ns());
    if (cpu_ns != nullptr) *cpu_ns = c10::getTime();
  }
  // Returns the time between two events in microseconds.
  float elapsed(const ProfilerVoidEventStub* from,
                const ProfilerVoidEventStub* to) const override {
    const auto at = [](const ProfilerVoidEventStub* event) {
      return *static_cast<const std::int64_t*>(event->get());
    };
    return static_cast<float>(at(to) - at(from)) / 1000;
  }
  void mark(const char* /*name*/) const override {}
  void rangePush(const char* /*name*/) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> op) const override { op(0); }
  void synchronize() const override {}
};

struct RegisteredStubs {
  RegisteredStubs() {
    static Stubs stubs;  // a static object, because PyTorch stores the pointer
    torch::profiler::impl::registerPrivateUse1Methods(&stubs);
  }
};
const RegisteredStubs registered_stubs;

}  // namespace
}  // namespace torch_qpu
