// Tests the file that records which processes use the QPUs.
#include <doctest/doctest.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sys/wait.h>
#include <unistd.h>

#include "qpu/error.h"
#include "runtime/state.hpp"
#include "tests/fake_vcio.hpp"

using qpu::runtime::Process;
using qpu::runtime::Record;
using qpu::runtime::State;
namespace fs = std::filesystem;

namespace {

Record memoryOf(const Process& p, std::uint32_t handle, std::uint32_t bytes) {
  Record r;
  r.kind = Record::Kind::Memory;
  r.process = p;
  r.handle = handle;
  r.bytes = bytes;
  return r;
}

unsigned modeOf(const std::string& path) {
  return static_cast<unsigned>(fs::status(path).permissions());
}

std::string fileOf(const test::FakeTree& tree) { return tree.state() + "/qpu.state"; }

}  // namespace

TEST_CASE("records can be added, cleared and replaced") {
  const test::FakeTree tree;
  State state(tree.state());
  const State::Lock lock(state);
  const Process self = Process::current();
  CHECK(self.pid == static_cast<std::uint32_t>(getpid()));
  CHECK(self.start > 0);
  CHECK(state.entries().empty());
  CHECK(state.add(memoryOf(self, 7, 4096)) == 0);
  CHECK(state.add(memoryOf(self, 8, 8192)) == 1);
  state.clear(0);
  REQUIRE(state.entries().size() == 1);
  CHECK(state.entries()[0].index == 1);
  CHECK(state.entries()[0].record.handle == 8);
  CHECK(state.entries()[0].record.bytes == 8192);
  CHECK(state.entries()[0].record.process == self);
  CHECK(state.add(memoryOf(self, 9, 4096)) == 0);
  const auto read = qpu::runtime::readState(tree.state());
  REQUIRE(read.size() == 2);
  CHECK(read[0].handle == 9);
}

TEST_CASE("a process is identified by its number and start time") {
  const Process self = Process::current();
  CHECK(self.alive());
  Process later = self;
  ++later.start;
  CHECK_FALSE(later.alive());
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  Process other;
  other.pid = static_cast<std::uint32_t>(child);
  std::ifstream stat("/proc/" + std::to_string(child) + "/stat");
  std::string word;
  for (int field = 1; field <= 22; ++field) stat >> word;
  other.start = std::stoull(word);
  CHECK(other.alive());
  kill(child, SIGKILL);
  siginfo_t info{};
  REQUIRE(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT) == 0);
  CHECK_FALSE(other.alive());  // the process is a zombie
  waitpid(child, nullptr, 0);
  CHECK_FALSE(other.alive());
}

TEST_CASE("a damaged record is dropped, the others remain") {
  const test::FakeTree tree;
  const Process self = Process::current();
  {
    State state(tree.state());
    const State::Lock lock(state);
    for (std::uint32_t handle = 1; handle <= 3; ++handle) state.add(memoryOf(self, handle, 4096));
  }
  {
    std::fstream file(fileOf(tree), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(2 * 48 + 5);
    file.put('\x5a');
  }
  State state(tree.state());
  CHECK(state.damaged() == 1);
  const State::Lock lock(state);
  REQUIRE(state.entries().size() == 2);
  CHECK(state.entries()[1].record.handle == 3);
}

TEST_CASE("a truncated record is dropped") {
  const test::FakeTree tree;
  {
    State state(tree.state());
    const State::Lock lock(state);
    for (std::uint32_t handle = 1; handle <= 3; ++handle)
      state.add(memoryOf(Process::current(), handle, 4096));
  }
  std::filesystem::resize_file(fileOf(tree), 3 * 48 + 20);
  State state(tree.state());
  CHECK(state.damaged() == 1);
  const State::Lock lock(state);
  CHECK(state.entries().size() == 2);
}

TEST_CASE("invalid and outdated state files are replaced") {
  const test::FakeTree tree;
  for (const char* text : {"", "short", "a text of more than forty-eight bytes, of no known format"}) {
    std::ofstream(fileOf(tree), std::ios::binary) << text;
    State state(tree.state());
    const State::Lock lock(state);
    CHECK(state.entries().empty());
    CHECK(state.damaged() == 0);
    CHECK(state.add(memoryOf(Process::current(), 1, 4096)) == 0);
  }
}

TEST_CASE("in a group's folder, the group shares the files") {
  const test::FakeTree tree;
  const State state(tree.state());
  for (const char* name : {"/qpu.state", "/qpu.launch"})
    CHECK(modeOf(tree.state() + name) == 0660);
}

TEST_CASE("in a world-writable folder, files are private") {
  const test::FakeTree tree;
  fs::permissions(tree.state(), fs::perms::all);
  { const State state(tree.state()); }
  for (const char* name : {"/qpu.state", "/qpu.launch"}) {
    const std::string path = tree.state() + name;
    CHECK(modeOf(path) == 0600);
    // Earlier versions created the file with this mode.
    fs::permissions(path, static_cast<fs::perms>(0666));
    { const State state(tree.state()); }
    CHECK(modeOf(path) == 0600);
  }
}

TEST_CASE("another user's file in a shared folder is rejected") {
  if (geteuid() != 0) return;  // only root can change the owner of a file
  const test::FakeTree tree;
  fs::permissions(tree.state(), fs::perms::all);
  for (const char* name : {"/qpu.state", "/qpu.launch"}) {
    const std::string path = tree.state() + name;
    std::ofstream(path).close();
    REQUIRE(chown(path.c_str(), 65534, 65534) == 0);
    std::string text;
    try {
      const State state(tree.state());
    } catch (const qpu::BackendError& e) {
      text = e.what();
    }
    CHECK(text.find(path + " belongs to user 65534") != std::string::npos);
    CHECK(text.find("/run/qpu") != std::string::npos);
    fs::remove(path);
  }
}

TEST_CASE("an unusable folder is reported with a fix") {
  std::string text;
  try {
    const State state("/no/such/folder");
  } catch (const qpu::BackendError& e) {
    text = e.what();
  }
  CHECK(text.find("/no/such/folder/qpu.state") != std::string::npos);
  CHECK(text.find("QPU_STATE_DIR") != std::string::npos);
  CHECK(qpu::runtime::readState("/no/such/folder").empty());
}
