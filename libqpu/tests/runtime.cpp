// Tests access to the hardware. The Raspberry Pi is a test double.
#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "isa/verify.hpp"
#include "qpu/error.h"
#include "runtime/device.hpp"
#include "runtime/executable.hpp"
#include "runtime/machine.hpp"
#include "runtime/mailbox.hpp"
#include "runtime/obstacles.hpp"
#include "runtime/report.hpp"
#include "runtime/round_trip.hpp"
#include "runtime/state.hpp"
#include "tests/fake_vcio.hpp"
#include "tests/support.hpp"

using qpu::runtime::Device;
using qpu::runtime::GpuMemory;
using qpu::runtime::Mailbox;
using qpu::runtime::Message;
using qpu::runtime::Method;
using qpu::runtime::Start;
using test::contains;
using test::FakeTree;
using test::FakeVcio;
using test::Launched;
using test::Setting;
using test::thrown;

namespace {

std::string refusal(FakeVcio& pi, const FakeTree& tree) {
  return thrown<qpu::BackendError>([&] { (void)Device::open(tree.host(pi)); });
}

// Simulates programs that add 1 to the word whose address is in their uniforms.
FakeVcio::Ends addOne(FakeVcio& pi, const std::vector<Launched>& programs) {
  for (const Launched& p : programs) {
    std::uint32_t value = 0;
    unsigned char* const at = pi.memory(p.uniforms, 4);
    if (at == nullptr) return FakeVcio::Ends::Never;
    std::memcpy(&value, at, 4);
    ++value;
    std::memcpy(at, &value, 4);
  }
  return FakeVcio::Ends::Yes;
}

// The memory layout in these tests: the code is at 0, the uniforms of QPU i are at 256 + 64 i,
// and the control block is at 2048.
std::vector<Start> starts(const GpuMemory& memory, std::uint32_t qpus) {
  std::vector<Start> all;
  for (std::uint32_t i = 0; i < qpus; ++i) {
    all.push_back({memory.bus() + 256 + 64 * i, memory.bus()});
    std::memcpy(memory.host() + 256 + 64 * i, &i, 4);
  }
  return all;
}
std::uint32_t uniform(const GpuMemory& memory, std::uint32_t qpu) {
  std::uint32_t value = 0;
  std::memcpy(&value, memory.host() + 256 + 64 * qpu, 4);
  return value;
}

// Runs `f` in a child process, and returns the child's status from waitpid().
template <typename F>
int inChild(F f) {
  const pid_t child = fork();
  if (child == 0) {
    f();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

// Runs a program in a child process that is killed while the program runs.
void killDuringLaunch(FakeVcio& pi, const FakeTree& tree) {
  (void)inChild([&] {
    pi.runs = [](const auto&) {
      (void)raise(SIGKILL);
      return FakeVcio::Ends::Never;
    };
    const auto device = Device::open(tree.host(pi));
    const auto memory = device->allocate(4096, "");
    device->launch(Method::Registers, starts(*memory, 1), *memory, 2048, "killed");
  });
}

}  // namespace

TEST_CASE("mailbox messages have the expected words") {
  using Words = std::array<std::uint32_t, 14>;
  CHECK(Message(0x00010006, {}, 2).words == Words{32, 0, 0x00010006, 8, 0, 0, 0, 0});
  CHECK(Message(0x0003000c, {4096, 4096, 4}, 1).words ==
        Words{36, 0, 0x0003000c, 12, 12, 4096, 4096, 4, 0});
  CHECK(Message(0x0003000d, {7}, 1).words == Words{28, 0, 0x0003000d, 4, 4, 7, 0});
  CHECK(Message(0x00030002, {5}, 2).words == Words{32, 0, 0x00030002, 8, 4, 5, 0, 0});
  CHECK(Message(0x00030011, {12, 0xc0000000, 0, 1000}, 1).words ==
        Words{40, 0, 0x00030011, 16, 16, 12, 0xc0000000, 0, 1000, 0});
  Message reply(0x00010006, {}, 2);
  CHECK_FALSE(reply.succeeded(2));
  reply.words[1] = 0x80000000;
  reply.words[4] = 0x80000008;
  CHECK(reply.succeeded(2));
  reply.words[1] = 0x80000001;
  CHECK_FALSE(reply.succeeded(2));
  reply.words[1] = 0x80000000;
  reply.words[4] = 0x80000004;
  CHECK_FALSE(reply.succeeded(2));
}

TEST_CASE("the ioctl number differs for 32-bit programs") {
  CHECK(qpu::runtime::propertyRequest(4) == 0xc0046400UL);
  CHECK(qpu::runtime::propertyRequest(8) == 0xc0086400UL);
}

TEST_CASE("the firmware answers property requests") {
  FakeVcio pi;
  Mailbox box(pi);
  CHECK(box.query(qpu::runtime::tag::kFirmwareRevision) == 0x5f440c10);
  CHECK(box.query(qpu::runtime::tag::kBoardRevision) == 0xa02082);
  CHECK(box.vcMemory().bytes == 0x04000000);
  CHECK(box.vcMemory().base == FakeVcio::kPhysical);
  CHECK(box.clockRate(5) == 400000000);
  CHECK(box.query(qpu::runtime::tag::kMeasuredClockRate, {5}) == 400000000);
  CHECK(box.query(qpu::runtime::tag::kTemperature, {0}) == 47236);
  CHECK(thrown<qpu::BackendError>([&] { box.query(0x00030099); }).find("does not support") !=
        std::string::npos);
  CHECK(pi.complaints() == "tag 0x00030099\n");
}

TEST_CASE("both methods enable, allocate, launch and disable") {
  for (const Method method : {Method::Registers, Method::Mailbox}) {
    FakeVcio pi;
    const FakeTree tree;
    {
      const auto device = Device::open(tree.host(pi));
      CHECK(pi.enabled() == 1);
      CHECK(device->openingNote().empty());
      CHECK(device->fault(method).empty());
      CHECK(pi.launches() == 1);
      pi.runs = [&pi](const auto& programs) { return addOne(pi, programs); };
      CHECK(device->clockHz() == 400000000);
      const auto memory = device->allocate(5000, "");
      CHECK(memory->bytes() == 8192);
      CHECK(memory->bus() == 0xc0000000 + FakeVcio::kPhysical);
      for (std::uint32_t qpus = 1; qpus <= 12; ++qpus) {
        device->launch(method, starts(*memory, qpus), *memory, 2048, "addOne");
        for (std::uint32_t i = 0; i < qpus; ++i) CHECK(uniform(*memory, i) == i + 1);
      }
      CHECK(pi.launches() == 1 + 78);
      CHECK(pi.cacheClears() == 1 + 12);
      CHECK(pi.allocations() == 1);
    }
    CHECK(pi.allocations() == 0);
    CHECK(pi.enabled() == 0);
    CHECK(pi.enables() == 1);
    CHECK(pi.complaints().empty());
    CHECK(qpu::runtime::readState(tree.state()).empty());
  }
}

TEST_CASE("memory flags and bus addresses depend on the board") {
  FakeVcio pi;
  const FakeTree newer;
  CHECK((Device::open(newer.host(pi))->allocate(4, "")->bus() & 0xf0000000U) == 0xf0000000);
  CHECK(pi.lastFlags() == 4);
  FakeTree tree("bcm2835");
  tree.file("proc/device-tree/soc/ranges",
            std::string("\x7e\0\0\0\x3f\0\0\0\x01\0\0\0", 12));
  CHECK((Device::open(tree.host(pi))->allocate(4, "")->bus() & 0xf0000000U) == 0x70000000);
  CHECK(pi.lastFlags() == 0xc);
  CHECK(pi.complaints().empty());
}

TEST_CASE("peripherals are located by the device tree") {
  FakeTree tree;
  const auto base = [&tree](const std::string& ranges) {
    FakeVcio none;
    tree.file("proc/device-tree/soc/ranges", ranges);
    return qpu::runtime::peripheralBase(tree.host(none).root);
  };
  CHECK(base(std::string("\x7e\0\0\0\x20\0\0\0\x01\0\0\0", 12)) == 0x20000000);
  CHECK(base(std::string("\x7e\0\0\0\x3f\0\0\0\x01\0\0\0", 12)) == 0x3f000000);
  CHECK(base(std::string("\x7e\0\0\0\0\0\0\0\xfe\0\0\0\x01\0\0\0", 16)) == 0xfe000000);
  CHECK(base("") == 0x20000000);
}

TEST_CASE("GPU memory is released after exhaustion") {
  FakeVcio pi(1U << 20U);
  const FakeTree tree;
  const auto device = Device::open(tree.host(pi));
  std::vector<std::unique_ptr<GpuMemory>> all;
  for (int i = 0; i < 256; ++i) all.push_back(device->allocate(4096, ""));
  CHECK(pi.allocations() == 256);
  const std::string text =
      thrown<qpu::AllocationError>([&] { device->allocate(1, "SharedArray: "); });
  CHECK(contains(text, "SharedArray: the GPU memory of 64 MiB has no room for 4096 bytes"));
  CHECK(contains(text, "gpu_mem"));
  all.erase(all.begin(), all.begin() + 2);
  CHECK(device->allocate(8192, "")->bus() == 0xc0000000 + FakeVcio::kPhysical);
  CHECK(pi.complaints().empty());
}

TEST_CASE("obstacles are reported with a fix, QPUs stay off") {
  FakeVcio pi;
  const FakeTree tree;
  const auto refused = [&](const std::string& what, const std::string& fix) {
    const std::string text = refusal(pi, tree);
    CHECK_MESSAGE(contains(text, what), text);
    CHECK_MESSAGE(contains(text, fix), text);
    CHECK(pi.enabled() == 0);
    CHECK(pi.allocations() == 0);
    CHECK(qpu::runtime::readState(tree.state()).empty());
  };
  pi.refusesQpus = true;
  refused("refuses to enable the QPUs", "vc4-kms-v3d");
  pi.refusesQpus = false;
  pi.lacksQpuTags = true;
  refused("does not support the property tag 0x00030012", "gpu_mem=64");
  pi.lacksQpuTags = false;
  pi.openMemError = EACCES;
  refused("cannot open /dev/mem: Permission denied", "run as root");
  pi.openMemError = 0;
  pi.openVcioError = EACCES;
  refused("cannot open /dev/vcio: Permission denied", "group video");
  pi.openVcioError = ENXIO;
  refused("cannot open /dev/vcio", "Raspberry Pi kernel");
  pi.openVcioError = 0;
  pi.ioctlError = ENOTTY;
  refused("Inappropriate ioctl", "does not belong to a Raspberry Pi kernel");
  pi.ioctlError = ETIMEDOUT;
  refused("timed out", "reboot");
  pi.ioctlError = EPERM;
  refused("Operation not permitted", "group video");
  pi.ioctlError = 0;
  const Setting nowhere("QPU_STATE_DIR", "/no/such/folder");
  refused("/no/such/folder/qpu.state", "QPU_STATE_DIR");
  CHECK(pi.complaints().empty());
}

TEST_CASE("QPUs stay off if the state file cannot grow") {
  FakeVcio pi;
  const FakeTree tree;
  { const qpu::runtime::State header(tree.state()); }
  CHECK(inChild([&] {
          (void)::signal(SIGXFSZ, SIG_IGN);
          const rlimit full{0, 0};
          if (setrlimit(RLIMIT_FSIZE, &full) != 0) _exit(1);
          if (!contains(refusal(pi, tree), "a folder with free space")) _exit(2);
        }) == 0);
  CHECK(pi.enabled() == 0);
  CHECK(Device::open(tree.host(pi))->openingNote().empty());
  CHECK(pi.complaints().empty());
}

TEST_CASE("a process killed before enabling the QPUs is harmless") {
  FakeVcio pi;
  const FakeTree tree;
  {
    qpu::runtime::State state(tree.state());
    const qpu::runtime::State::Lock lock(state);
    qpu::runtime::Record record;
    record.kind = qpu::runtime::Record::Kind::Holder;
    record.process = {1, 1};  // process 1 started at another time
    state.add(record);
  }
  const auto device = Device::open(tree.host(pi));
  CHECK(contains(device->openingNote(), "1 ended processes"));
  CHECK(pi.enabled() == 1);
}

TEST_CASE("unsuitable boards are rejected without access") {
  FakeVcio pi;
  FakeTree four("bcm2711");
  CHECK(contains(refusal(pi, four), "VideoCore VI"));
  FakeTree kms;
  kms.file("proc/device-tree/soc/v3d@7ec00000/status", std::string("okay\0", 5));
  CHECK(contains(refusal(pi, kms), "full KMS driver owns V3D"));
  FakeTree rendering;
  rendering.file("dev/dri/renderD128", "");
  CHECK(contains(refusal(pi, rendering), "renderD128"));
  CHECK(pi.enables() == 0);
}

TEST_CASE("the mailbox is used without V3D's registers") {
  const FakeTree tree;
  const auto fault = [&tree](FakeVcio& pi) {
    const auto device = Device::open(tree.host(pi));
    CHECK(device->fault(Method::Mailbox).empty());
    CHECK(pi.enabled() == 1);
    return device->fault(Method::Registers);
  };
  FakeVcio strict;
  strict.mapRegistersError = EPERM;
  CHECK(contains(fault(strict), "iomem=relaxed"));
  FakeVcio powerless;
  powerless.powerless = true;
  CHECK(contains(fault(powerless), "identification is 0xdeadbeef"));
  FakeVcio drawing;
  drawing.draws = true;
  CHECK(contains(fault(drawing), "3D job"));
}

TEST_CASE("the round trip program violates no rule") {
  const auto words = qpu::runtime::roundTripProgram();
  CHECK(qpu::isa::verify(words).empty());
}

TEST_CASE("wrongly mapped memory is detected before use") {
  FakeVcio pi;
  const FakeTree tree;
  const auto device = Device::open(tree.host(pi));
  pi.memoryElsewhere = true;
  CHECK(contains(device->fault(Method::Registers),
                 "kernel 'round trip through GPU memory' did not finish within 500 ms"));
  pi.runs = [](const auto&) { return FakeVcio::Ends::Yes; };
  CHECK(contains(device->fault(Method::Mailbox), "memory at bus address 0xfb000000 differs "
                                                 "from what the CPU reads at 0x3b000000"));
  CHECK(pi.allocations() == 0);
}

TEST_CASE("memory that cannot be mapped is released") {
  FakeVcio pi;
  const FakeTree tree;
  const auto device = Device::open(tree.host(pi));
  pi.mapMemoryError = EPERM;
  CHECK(contains(thrown<qpu::BackendError>([&] { device->allocate(4096, ""); }), "iomem=relaxed"));
  CHECK(pi.allocations() == 0);
  CHECK(pi.complaints().empty());
}

TEST_CASE("a timeout by registers resets the QPUs") {
  FakeVcio pi;
  const FakeTree tree;
  const Setting limit("QPU_TIMEOUT_MS", "250");
  pi.runs = [](const auto&) { return FakeVcio::Ends::Never; };
  const auto device = Device::open(tree.host(pi));
  const auto memory = device->allocate(4096, "");
  const std::string text = thrown<qpu::ExecutionError>(
      [&] { device->launch(Method::Registers, starts(*memory, 3), *memory, 2048, "endless"); });
  CHECK(contains(text, "kernel 'endless' did not finish within 250 ms (SRQCS 0x00000300, PCS "
                       "0x00000000, ERRSTAT 0x00000000)"));
  CHECK(contains(text, "disabled and enabled again"));
  CHECK(pi.enables() == 2);
  pi.runs = [&pi](const auto& programs) { return addOne(pi, programs); };
  device->launch(Method::Registers, starts(*memory, 2), *memory, 2048, "next");
  CHECK(uniform(*memory, 1) == 2);
  CHECK(pi.complaints().empty());
}

TEST_CASE("a timeout by mailbox resets the QPUs") {
  FakeVcio pi;
  const FakeTree tree;
  const auto device = Device::open(tree.host(pi));
  const auto memory = device->allocate(4096, "");
  const auto text = [&] {
    return thrown<qpu::ExecutionError>(
        [&] { device->launch(Method::Mailbox, starts(*memory, 3), *memory, 2048, "long"); });
  };
  pi.runs = [](const auto&) { return FakeVcio::Ends::WithoutInterrupt; };
  CHECK(contains(text(), "did not finish within 10000 ms, or did not raise the host interrupt"));
  pi.kernelLimitMs = 1000;
  CHECK(contains(text(), "did not finish within 1000 ms, the limit of this Linux kernel"));
  CHECK(contains(text(), "QPU_BACKEND=vc4-registers, or split"));
  const Setting limit("QPU_TIMEOUT_MS", "500");
  CHECK(contains(text(), "500 ms, or did not raise"));
  CHECK(pi.complaints().empty());
}

TEST_CASE("a V3D that cannot be recovered is not used again") {
  FakeVcio pi;
  const FakeTree tree;
  pi.stuckAfterTimeOut = true;
  pi.runs = [](const auto&) { return FakeVcio::Ends::Never; };
  const auto device = Device::open(tree.host(pi));
  const auto memory = device->allocate(4096, "");
  const auto go = [&] {
    device->launch(Method::Registers, starts(*memory, 1), *memory, 2048, "k");
  };
  CHECK(contains(thrown<qpu::ExecutionError>(go), "reboot"));
  CHECK(contains(thrown<qpu::BackendError>(go), "could not be stopped; end all processes"));
}

TEST_CASE("a kernel that blocks the firmware is reported by name") {
  FakeVcio pi;
  const FakeTree tree;
  pi.kernelLimitMs = 1000;
  pi.runs = [&pi](const auto&) {
    pi.ioctlError = ETIMEDOUT;  // the firmware does not reply while the program runs
    return FakeVcio::Ends::Never;
  };
  auto device = Device::open(tree.host(pi));
  auto memory = device->allocate(4096, "");
  auto other = device->allocate(4096, "");
  const auto go = [&] {
    device->launch(Method::Mailbox, starts(*memory, 1), *memory, 2048, "long");
  };
  const std::string text = thrown<qpu::ExecutionError>(go);
  CHECK_MESSAGE(contains(text, "kernel 'long' did not finish within 1000 ms"), text);
  CHECK_MESSAGE(contains(text, "reboot"), text);
  CHECK(contains(thrown<qpu::BackendError>(go), "could not be stopped; end all processes"));
  // The program may still write to memory that its owner has freed.
  pi.ioctlError = 0;
  other.reset();
  CHECK(pi.allocations() == 2);
  memory.reset();
  device.reset();
  CHECK(pi.enabled() == 0);
  CHECK(pi.allocations() == 0);
  CHECK(pi.complaints().empty());
  CHECK(qpu::runtime::readState(tree.state()).empty());
}

TEST_CASE("a kernel that cannot be stopped keeps its memory") {
  FakeVcio pi;
  const FakeTree tree;
  const Setting limit("QPU_TIMEOUT_MS", "250");
  auto idle = Device::open(tree.host(pi));
  CHECK(inChild([&] {
          pi.runs = [](const auto&) { return FakeVcio::Ends::Never; };
          const auto device = Device::open(tree.host(pi));
          const auto memory = device->allocate(4096, "");
          const auto go = [&] {
            device->launch(Method::Registers, starts(*memory, 1), *memory, 2048, "endless");
          };
          if (!contains(thrown<qpu::ExecutionError>(go), "other processes also use")) _exit(1);
          if (!contains(thrown<qpu::BackendError>(go), "could not be stopped")) _exit(2);
        }) == 0);
  CHECK(pi.allocations() == 1);
  CHECK(inChild([&] {
          if (!Device::open(tree.host(pi))->openingNote().empty()) _exit(1);
        }) == 0);
  CHECK(pi.allocations() == 1);
  idle.reset();
  CHECK(pi.enabled() == 0);
  idle = Device::open(tree.host(pi));
  CHECK(pi.allocations() == 0);
  CHECK(pi.complaints().empty());
}

TEST_CASE("without registers, a late kernel is not waited for") {
  for (const bool mapped : {false, true}) {
    FakeVcio pi;
    const FakeTree tree;
    pi.mapRegistersError = mapped ? 0 : EPERM;
    pi.powerless = mapped;
    pi.unpowered = 0;
    const auto idle = Device::open(tree.host(pi));
    CHECK(inChild([&] {
            pi.runs = [](const auto&) { return FakeVcio::Ends::Never; };
            const auto device = Device::open(tree.host(pi));
            const auto memory = device->allocate(4096, "");
            const auto go = [&] {
              device->launch(Method::Mailbox, starts(*memory, 1), *memory, 2048, "endless");
            };
            if (!contains(thrown<qpu::ExecutionError>(go), "other processes also use")) _exit(1);
            if (!contains(thrown<qpu::BackendError>(go), "could not be stopped")) _exit(2);
          }) == 0);
    CHECK(pi.allocations() == 1);
    CHECK(pi.complaints().empty());
  }
}

TEST_CASE("without power, memory of killed processes is freed") {
  FakeVcio pi;
  const FakeTree tree;
  pi.powerless = true;
  const auto idle = Device::open(tree.host(pi));
  (void)inChild([&] {
    const auto device = Device::open(tree.host(pi));
    const auto memory = device->allocate(4096, "");
    (void)raise(SIGKILL);
  });
  CHECK(pi.allocations() == 1);
  CHECK(inChild([&] { (void)Device::open(tree.host(pi)); }) == 0);
  CHECK(pi.allocations() == 0);
  CHECK(pi.complaints().empty());
}

TEST_CASE("a failed test launch leaves the other method usable") {
  FakeVcio pi;
  const FakeTree tree;
  auto idle = Device::open(tree.host(pi));
  CHECK(inChild([&] {
          pi.runs = [](const auto&) { return FakeVcio::Ends::Never; };
          const auto device = Device::open(tree.host(pi));
          if (!contains(device->fault(Method::Registers), "other processes also use")) _exit(1);
          pi.runs = nullptr;
          if (!device->fault(Method::Mailbox).empty()) _exit(2);
          (void)device->allocate(4096, "");
          if (pi.allocations() != 1) _exit(3);
        }) == 0);
  CHECK(pi.allocations() == 1);  // memory of the test program, which may still be running
  idle.reset();
  idle = Device::open(tree.host(pi));
  CHECK(pi.allocations() == 0);
  CHECK(pi.complaints().empty());
}

TEST_CASE("a kernel that finishes late does not block launches") {
  FakeVcio pi;
  const FakeTree tree;
  const Setting limit("QPU_TIMEOUT_MS", "250");
  const auto idle = Device::open(tree.host(pi));
  CHECK(inChild([&] {
          pi.runs = [](const auto&) { return FakeVcio::Ends::Never; };
          pi.programsEnd = std::chrono::milliseconds(400);
          const auto device = Device::open(tree.host(pi));
          const auto memory = device->allocate(4096, "");
          const auto go = [&] {
            device->launch(Method::Registers, starts(*memory, 1), *memory, 2048, "long");
          };
          if (!contains(thrown<qpu::ExecutionError>(go), "it finished later")) _exit(1);
          pi.runs = [&pi](const auto& programs) { return addOne(pi, programs); };
          go();
          if (uniform(*memory, 0) != 1) _exit(2);
        }) == 0);
  CHECK(pi.enables() == 1);
  CHECK(pi.allocations() == 0);
  CHECK(pi.complaints().empty());
}

TEST_CASE("queue overflows and invalid timeouts are errors") {
  FakeVcio pi;
  const FakeTree tree;
  pi.queueOverflows = true;
  const auto device = Device::open(tree.host(pi));
  const auto memory = device->allocate(4096, "");
  const auto go = [&] {
    device->launch(Method::Registers, starts(*memory, 1), *memory, 2048, "k");
  };
  CHECK(contains(thrown<qpu::ExecutionError>(go), "queue overflowed"));
  const Setting limit("QPU_TIMEOUT_MS", "soon");
  CHECK(contains(thrown<qpu::BackendError>(go), "QPU_TIMEOUT_MS=soon"));
}

TEST_CASE("the first process enables, the last one disables") {
  FakeVcio pi;
  const FakeTree tree;
  auto device = Device::open(tree.host(pi));
  const int status = inChild([&] {
    const auto other = Device::open(tree.host(pi));
    const auto memory = other->allocate(4096, "");
    if (pi.enables() != 1 || !other->openingNote().empty()) _exit(1);
    const auto users = qpu::runtime::usersOf(tree.state());
    if (users.size() != 2 || users[1].bytes != 4096 || !users[1].holds) _exit(2);
  });
  CHECK(status == 0);
  CHECK(pi.enabled() == 1);
  CHECK(pi.allocations() == 0);
  device.reset();
  CHECK(pi.enabled() == 0);
  CHECK(pi.complaints().empty());
}

TEST_CASE("resources of killed processes are released") {
  FakeVcio pi;
  const FakeTree tree;
  const int status = inChild([&] {
    const auto device = Device::open(tree.host(pi));
    const auto a = device->allocate(4096, "");
    const auto b = device->allocate(8192, "");
    (void)raise(SIGKILL);
  });
  CHECK(WTERMSIG(status) == SIGKILL);
  CHECK(pi.enabled() == 1);
  CHECK(pi.allocations() == 2);
  const auto dead = qpu::runtime::usersOf(tree.state());
  REQUIRE(dead.size() == 1);
  CHECK_FALSE(dead[0].alive);
  CHECK(dead[0].pieces == 2);
  auto device = Device::open(tree.host(pi));
  CHECK(device->openingNote() ==
        "released resources of 1 ended processes: 2 allocations of GPU memory, 12288 bytes");
  CHECK(pi.allocations() == 0);
  CHECK(pi.enabled() == 1);
  CHECK(pi.enables() == 2);
  device.reset();
  CHECK(pi.enabled() == 0);
  CHECK(pi.complaints().empty());
}

TEST_CASE("QPUs stop before memory of killed processes is freed") {
  FakeVcio pi;
  const FakeTree tree;
  killDuringLaunch(pi, tree);
  CHECK(pi.allocations() == 1);
  const auto device = Device::open(tree.host(pi));
  CHECK(pi.allocations() == 0);
  CHECK(pi.enables() == 2);
  CHECK(pi.complaints().empty());
}

TEST_CASE("a launch waits for programs of a killed process") {
  FakeVcio pi;
  const FakeTree tree;
  const Setting limit("QPU_TIMEOUT_MS", "250");
  const auto go = [](Device& device, const GpuMemory& memory) {
    device.launch(Method::Registers, starts(memory, 1), memory, 2048, "next");
  };
  const auto device = Device::open(tree.host(pi));
  const auto memory = device->allocate(4096, "");
  pi.runs = [&pi](const auto& programs) { return addOne(pi, programs); };
  killDuringLaunch(pi, tree);
  pi.programsEnd = std::chrono::milliseconds(100);
  go(*device, *memory);
  CHECK(uniform(*memory, 0) == 1);
  pi.programsEnd = std::chrono::nanoseconds(0);
  killDuringLaunch(pi, tree);
  CHECK(inChild([&] {
          const auto other = Device::open(tree.host(pi));
          const auto mine = other->allocate(4096, "");
          for (int i = 0; i < 2; ++i) {
            const std::string text = thrown<qpu::ExecutionError>([&] { go(*other, *mine); });
            if (!contains(text, "kernel 'next' was not started") ||
                !contains(text, "did not finish within 250 ms (SRQCS 0x00000100, ") ||
                !contains(text, "other processes also use"))
              _exit(1);
          }
        }) == 0);
  CHECK(pi.enables() == 1);
  go(*device, *memory);  // stops the program, because no other process uses the QPUs
  CHECK(uniform(*memory, 0) == 1);
  CHECK(pi.enables() == 2);
  CHECK(pi.complaints().empty());
}

TEST_CASE("a test launch waits for programs of killed processes") {
  FakeVcio pi;
  const FakeTree tree;
  const auto device = Device::open(tree.host(pi));
  killDuringLaunch(pi, tree);
  pi.programsEnd = std::chrono::seconds(2);
  CHECK(device->fault(Method::Registers).empty());
  CHECK(pi.complaints().empty());
}

TEST_CASE("a test launch stops programs of killed processes") {
  FakeVcio pi;
  const FakeTree tree;
  const auto device = Device::open(tree.host(pi));
  killDuringLaunch(pi, tree);
  CHECK(device->fault(Method::Registers).empty());
  CHECK(pi.enables() == 2);
  CHECK(pi.complaints().empty());
}

TEST_CASE("counts of stopped programs do not block launches") {
  FakeVcio pi;
  const FakeTree tree;
  pi.keepsCounts = true;
  killDuringLaunch(pi, tree);
  const auto device = Device::open(tree.host(pi));
  const auto memory = device->allocate(4096, "");
  const auto go = [&] {
    device->launch(Method::Registers, starts(*memory, 1), *memory, 2048, "next");
  };
  for (int i = 0; i < 2; ++i) {
    pi.runs = [&pi](const auto& programs) { return addOne(pi, programs); };
    go();
    CHECK(uniform(*memory, 0) == 1);
    pi.runs = [](const auto&) { return FakeVcio::Ends::Never; };
    CHECK(contains(thrown<qpu::ExecutionError>(go), "disabled and enabled again"));
  }
  CHECK(pi.complaints().empty());
}

TEST_CASE("a launch that waits while the process exits fails") {
  FakeVcio pi;
  const FakeTree tree;
  const auto idle = Device::open(tree.host(pi));
  killDuringLaunch(pi, tree);
  pi.programsEnd = std::chrono::milliseconds(100);
  CHECK(inChild([&] {
          const auto device = Device::open(tree.host(pi));
          const auto memory = device->allocate(4096, "");
          pi.onPause = [&] { device->close(); };
          const std::string text = thrown<qpu::BackendError>([&] {
            device->launch(Method::Registers, starts(*memory, 1), *memory, 2048, "late");
          });
          if (!contains(text, "the process is exiting")) _exit(1);
        }) == 0);
  CHECK(pi.launches() == 1);
  CHECK(pi.complaints().empty());
}

TEST_CASE("releasing for a dead process keeps the QPUs on") {
  FakeVcio pi;
  const FakeTree tree;
  const auto mine = Device::open(tree.host(pi));
  (void)inChild([&] {
    const auto device = Device::open(tree.host(pi));
    const auto a = device->allocate(4096, "");
    (void)raise(SIGKILL);
  });
  CHECK(inChild([&] {
          const auto third = Device::open(tree.host(pi));
          if (third->openingNote().empty() || pi.allocations() != 0 || pi.enables() != 1) _exit(1);
        }) == 0);
  CHECK(pi.enabled() == 1);
  CHECK(pi.complaints().empty());
}

TEST_CASE("fatal signals and exit() disable the QPUs") {
  for (const int signal : {SIGTERM, SIGINT, SIGSEGV, SIGABRT, 0}) {
    FakeVcio pi;
    const FakeTree tree;
    const int status = inChild([&] {
      (void)::signal(SIGINT, SIG_DFL);
      for (const int s : {SIGTERM, SIGSEGV, SIGABRT}) (void)::signal(s, SIG_DFL);
      // As in users' programs, these static objects still exist when the process ends.
      static const qpu::runtime::WithHost* host = nullptr;
      static const GpuMemory* memory = nullptr;
      host = new qpu::runtime::WithHost(tree.host(pi));
      memory = qpu::runtime::openDevice().device->allocate(4096, "").release();
      if (host == nullptr || memory == nullptr || pi.enabled() != 1 || pi.allocations() != 1) _exit(1);
      if (signal != 0) (void)raise(signal);
      std::exit(0);  // NOLINT(concurrency-mt-unsafe)
    });
    if (signal == 0)
      CHECK(status == 0);
    else
      CHECK(WTERMSIG(status) == signal);
    CHECK(pi.enabled() == 0);
    CHECK(pi.allocations() == 0);
    CHECK(pi.complaints().empty());
    CHECK(qpu::runtime::readState(tree.state()).empty());
  }
}

TEST_CASE("signals that the program handles are unchanged") {
  FakeVcio pi;
  const FakeTree tree;
  CHECK(inChild([&] {
          (void)::signal(SIGTERM, SIG_IGN);
          const qpu::runtime::WithHost host(tree.host(pi));
          if (!qpu::runtime::openDevice().device) _exit(1);
          (void)raise(SIGTERM);
          if (pi.enabled() != 1) _exit(2);
        }) == 0);
}

TEST_CASE("a forked process cannot use or disable the QPUs") {
  FakeVcio pi;
  const FakeTree tree;
  auto device = Device::open(tree.host(pi));
  const auto memory = device->allocate(4096, "");
  CHECK(inChild([&] {
          const std::string text =
              thrown<qpu::BackendError>([&] { (void)device->allocate(4096, ""); });
          if (!contains(text, "fork")) _exit(1);
          device->close();
        }) == 0);
  CHECK(pi.enabled() == 1);
  CHECK(pi.allocations() == 1);
}

TEST_CASE("uniforms of a kernel that cannot be stopped are kept") {
  FakeVcio pi;
  const FakeTree tree;
  const qpu::runtime::WithHost host(tree.host(pi));
  pi.stuckAfterTimeOut = true;
  std::uint32_t uniforms = 0;
  pi.runs = [&](const auto& programs) {
    uniforms = programs[0].uniforms;
    return FakeVcio::Ends::Never;
  };
  auto object = std::make_shared<qpu::code::Object>();
  object->words = qpu::runtime::roundTripProgram();
  qpu::runtime::Executable kernel(object);
  const auto go = [&](std::uint32_t value) {
    kernel.runStreams(qpu::runtime::Kind::Registers, {{value}}, false);
  };
  CHECK(contains(thrown<qpu::ExecutionError>([&] { go(1); }), "reboot"));
  CHECK(contains(thrown<qpu::BackendError>([&] { go(2); }), "could not be stopped"));
  std::uint32_t value = 0;
  REQUIRE(pi.memory(uniforms, 4) != nullptr);
  std::memcpy(&value, pi.memory(uniforms, 4), 4);
  CHECK(value == 1);
}

TEST_CASE("the report contains the state of the hardware") {
  FakeVcio pi;
  const FakeTree tree;
  const qpu::runtime::WithHost with(tree.host(pi));
  REQUIRE(qpu::runtime::openDevice().device);
  const qpu::runtime::Findings f = qpu::runtime::findAll(tree.host(pi));
  CHECK(f.v3d.ident0 == 0x02443356U);
  CHECK(f.v3d.clockHz == 400000000U);
  CHECK(f.system.gpuMemoryMib == 64);
  REQUIRE(f.users.size() == 1);
  CHECK(f.users[0].holds);
  CHECK(f.stateFolder == tree.state());
}
