// Tests kernels on the hardware backends. The Raspberry Pi is a test double, which runs the
// launched programs on the emulator.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "code/serialise.hpp"
#include "kernels/host.hpp"
#include "runtime/backends.hpp"
#include "runtime/cache.hpp"
#include "runtime/executable.hpp"
#include "runtime/machine.hpp"
#include "runtime/object_file.hpp"
#include "runtime/sha256.hpp"
#include "runtime/words.hpp"
#include "tests/fake_vcio.hpp"
#include "tests/folder.hpp"
#include "tests/run.hpp"
#include "tutorial/oet.hpp"
#include "tutorial/rot3d.hpp"

using test::contains;
using test::FakeTree;
using test::FakeVcio;
using test::Folder;
using test::Setting;
using test::thrown;

namespace {

// Replaces this machine with the simulated Raspberry Pi.
struct Pi {
  FakeVcio os{8U << 20U};
  FakeTree tree;
  qpu::runtime::WithHost host{tree.host(os)};
};

// Returns the text that `f` writes to standard error.
template <typename F>
std::string standardErrorOf(F f) {
  std::FILE* const file = std::tmpfile();
  REQUIRE(file != nullptr);
  (void)std::fflush(stderr);
  const int before = dup(STDERR_FILENO);
  REQUIRE(dup2(fileno(file), STDERR_FILENO) >= 0);
  f();
  (void)std::fflush(stderr);
  REQUIRE(dup2(before, STDERR_FILENO) >= 0);
  (void)close(before);
  std::string text(static_cast<std::size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  CHECK(std::fread(text.data(), 1, text.size(), file) == text.size());
  (void)std::fclose(file);
  return text;
}

void scaled(Int n, Float factor, Ptr<Float> x) {
  For (Int i = me() << 4, i < n, i = i + (numQPUs() << 4))
    x[i + index()] = x[i + index()] * factor;
  End
}

// A kernel with so many live vectors that some of them are spilled.
void crowded(Ptr<Int> in, Ptr<Int> out) {
  Int x = in[0];
  std::vector<Int> all(160, Int(0));
  for (int i = 0; i < 160; ++i) {
    x = (x * 5) ^ i;
    all[static_cast<std::size_t>(i)] = x;
  }
  Int sum = 0;
  for (int i = 0; i < 160; ++i) sum = (sum * 3) ^ all[static_cast<std::size_t>(i)];
  for (int i = 159; i >= 0; --i) sum = (sum * 5) ^ all[static_cast<std::size_t>(i)];
  out[me() << 4] = sum;
}

void checkScaled(int qpus) {
  SharedArray<float> x(160);
  for (int i = 0; i < 160; ++i) x[i] = static_cast<float>(i);
  auto k = compile(scaled, "scaled");
  k.setNumQPUs(qpus);
  k(160, 0.5F, &x);
  for (int i = 0; i < 160; ++i) CHECK(x[i] == static_cast<float>(i) * 0.5F);
}

}  // namespace

TEST_CASE("the first backend that works is selected") {
  unsetenv("QPU_BACKEND");
  {
    const Pi pi;
    CHECK(std::string(qpu::backend().name) == "vc4-registers");
    CHECK(contains(qpu::backend().reason, "QPU_BACKEND is not set"));
  }
  {
    Pi pi;
    pi.os.mapRegistersError = EPERM;
    CHECK(std::string(qpu::backend().name) == "vc4-mailbox");
    CHECK(contains(qpu::backend().reason, "vc4-registers: cannot map V3D's registers"));
    const Setting s("QPU_BACKEND", "vc4-registers");
    CHECK(contains(thrown<qpu::BackendError>([] { qpu::backend(); }), "iomem=relaxed"));
  }
  {
    Pi pi;
    pi.os.refusesQpus = true;
    CHECK(std::string(qpu::backend().name) == "interpreter");
    CHECK(contains(qpu::backend().reason, "refuses to enable the QPUs"));
    const auto findings = qpu::runtime::backendFindings();
    REQUIRE(findings.size() == 4);
    CHECK_FALSE(findings[0].usable);
    CHECK_FALSE(findings[1].usable);
    CHECK(findings[2].usable);
    CHECK(findings[3].usable);
  }
  CHECK(std::string(qpu::backend().name) == "interpreter");
}

TEST_CASE("kernels run on both hardware backends") {
  for (const char* backend : {"vc4-registers", "vc4-mailbox"}) {
    Pi pi;
    const Setting s("QPU_BACKEND", backend);
    for (const int qpus : {1, 5, 12}) checkScaled(qpus);
    SharedArray<int> a(32);
    for (int i = 0; i < 32; ++i) a[i] = 31 * i % 37 - 18;
    CHECK((a.getAddress() & 0xfff) == 0);
    compile(tutorial::oddEvenSort, "oddEvenSort")(&a);
    for (int i = 1; i < 32; ++i)
      CHECK(a[(i - 1) / 2 + 16 * ((i - 1) % 2)] <= a[i / 2 + 16 * (i % 2)]);
    CHECK(pi.os.fault.empty());
    CHECK(pi.os.complaints().empty());
    CHECK(pi.os.launches() == 1 + 18 + 1);
  }
}

TEST_CASE("arrays and programs release their GPU memory") {
  Pi pi;
  const Setting s("QPU_BACKEND", "vc4-registers");
  checkScaled(3);
  CHECK(pi.os.allocations() == 0);
  SharedArray<int> a(100);
  for (int i = 0; i < 100; ++i) CHECK(a[i] == 0);
  CHECK(pi.os.allocations() == 1);
  SharedArray<int> b = std::move(a);
  CHECK(pi.os.allocations() == 1);
  b.dealloc();
  CHECK(pi.os.allocations() == 0);
  CHECK(contains(thrown<qpu::AllocationError>([] { SharedArray<int> big(4U << 20U); }),
                 "SharedArray of 4194304 elements: the GPU memory of 64 MiB has no room"));
  CHECK(pi.os.complaints().empty());
}

TEST_CASE("unused arrays make room for a kernel's code") {
  static std::vector<SharedArray<int>> unused;
  qpu::onAllocationFailure([] { unused.clear(); });
  Pi pi;
  const Setting s("QPU_BACKEND", "vc4-registers");
  SharedArray<float> x(16);
  for (float& f : x) f = 2;
  unused.emplace_back((2U << 20U) - 1024);  // all GPU memory that is left
  CHECK(pi.os.allocations() == 2);
  compile(scaled, "scaled")(16, 3, &x);
  for (const float f : x) CHECK(f == 6);
  CHECK(unused.empty());
  CHECK(pi.os.complaints().empty());
}

TEST_CASE("scratch arrays are released before an allocation fails") {
  Pi pi;
  const Setting s("QPU_BACKEND", "vc4-registers");
  { const qpu::kernels::Scratch scratch(1); }
  CHECK(pi.os.allocations() == 1);
  const SharedArray<int> all(2U << 20U);
  CHECK(pi.os.allocations() == 1);
  CHECK(pi.os.complaints().empty());
}

TEST_CASE("spill slots are in GPU memory, or in host memory") {
  SharedArray<int> in(16);
  for (int i = 0; i < 16; ++i) in[i] = static_cast<int>(2654435761U * static_cast<unsigned>(i));
  SharedArray<int> expected(48);
  const auto go = [](SharedArray<int>& from, SharedArray<int>& to) {
    auto k = compile(crowded, "crowded");
    k.setNumQPUs(3);
    k(&from, &to);
  };
  go(in, expected);  // runs on the interpreter
  {
    const Folder folder;
    const std::string path = (folder.path / "crowded").string();
    compile(crowded, "crowded").save(path.c_str());
    CHECK(qpu::runtime::openObject(path).spillBytes >= 64);
  }
  {
    const Setting s("QPU_BACKEND", "emulator");
    SharedArray<int> out(48);
    go(in, out);
    for (int i = 0; i < 48; ++i) CHECK(out[i] == expected[i]);
  }
  for (const char* backend : {"vc4-registers", "vc4-mailbox"}) {
    Pi pi;
    const Setting s("QPU_BACKEND", backend);
    SharedArray<int> from(16), to(48);
    from.copyFrom(in.data(), 16);
    go(from, to);
    for (int i = 0; i < 48; ++i) CHECK(to[i] == expected[i]);
    CHECK(pi.os.fault.empty());
  }
}

TEST_CASE("threads take turns on the QPUs") {
  Pi pi;
  const Setting s("QPU_BACKEND", "vc4-registers");
  const auto k = [] {
    auto made = compile(scaled, "scaled");
    made.setNumQPUs(4);
    return made;
  }();
  std::vector<std::thread> threads;
  std::array<int, 4> right{};
  for (std::size_t t = 0; t < right.size(); ++t)
    threads.emplace_back([&k, &right, t] {
      for (int round = 0; round < 10; ++round) {
        SharedArray<float> x(64);
        for (float& f : x) f = 3;
        k(64, static_cast<float>(t), &x);
        bool same = true;
        for (const float f : x) same = same && f == 3 * static_cast<float>(t);
        right[t] += same ? 1 : 0;
      }
    });
  for (std::thread& t : threads) t.join();
  for (const int n : right) CHECK(n == 10);
  CHECK(pi.os.complaints().empty());
}

TEST_CASE("hardware rejects an array of another backend") {
  SharedArray<float> x(16);
  Pi pi;
  const Setting s("QPU_BACKEND", "vc4-registers");
  const auto k = compile(scaled, "scaled");
  CHECK(contains(thrown<qpu::ArgumentError>([&] { k(16, 1, &x); }),
                 "kernel 'scaled': argument 3 was allocated while no hardware backend"));
  CHECK(pi.os.launches() == 1);  // the round-trip test of the backend
}

TEST_CASE("a kernel runs after a change of the backend") {
  const auto k = compile(scaled, "scaled");
  SharedArray<float> x(16);
  for (float& f : x) f = 2;
  k(16, 3, &x);
  const Setting s("QPU_BACKEND", "emulator");
  k(16, 3, &x);
  for (const float f : x) CHECK(f == 18);
}

TEST_CASE("on the emulator, compile() rejects what QPUs cannot run") {
  const auto f = [](Int) {
    for (int i = 0; i < 16; ++i) {
      semaInc(i);
      semaDec(i);
    }
  };
  const auto k = compile(f, "signals");
  const Setting s("QPU_BACKEND", "emulator");
  const auto compiles = [&] { (void)compile(f, "signals"); };
  CHECK(contains(thrown<qpu::CompileError>(compiles), "kernel 'signals': the kernel uses all 16 semaphores"));
  CHECK_THROWS_AS(k(1), qpu::CompileError);
}

TEST_CASE("a kernel has a listing, a profile and cycles") {
  auto k = compile(scaled, "scaled");
  k.setNumQPUs(2);
  SharedArray<float> x(64);
  k(64, 2, &x);  // runs on the interpreter
  CHECK(std::string(k.cycles().board).empty());
  CHECK(k.cycles().clocks == 0);
  const std::string plain = k.listing();
  CHECK(contains(plain, "scaled"));
  CHECK(contains(plain, "vpm_st_addr"));
  CHECK_FALSE(contains(plain, "model of"));

  const Setting s("QPU_BACKEND", "emulator");
  const Setting board("QPU_BOARD", "zero");
  k.setProfiling(true);
  k(64, 2, &x);
  const qpu::Cycles c = k.cycles();
  CHECK(std::string(c.board) == "zero");
  CHECK(c.instructions > 20);
  CHECK(c.clocks >= 4 * c.instructions / 2);
  CHECK(c.memoryWriteBytes == 256);
  CHECK(c.seconds() == doctest::Approx(static_cast<double>(c.clocks) / c.clockHz));
  CHECK(contains(k.listing(), "model of zero: " + std::to_string(c.clocks) + " clocks"));
  CHECK(contains(k.listing(), "(not measured on hardware)"));
  std::FILE* const file = std::tmpfile();
  REQUIRE(file != nullptr);
  k.dump(file);
  CHECK(std::ftell(file) == static_cast<long>(k.listing().size()));
  CHECK(std::fclose(file) == 0);
}

TEST_CASE("a kernel is saved unless its path is invalid") {
  const Folder folder;
  const auto k = compile(scaled, "scaled");
  const std::string path = (folder.path / "scaled.qpuo").string();
  k.save(path.c_str());
  const qpu::code::Object object = qpu::runtime::openObject(path);
  CHECK(object.name == "scaled");
  CHECK(object.parameters == 3);
  CHECK(contains(thrown<qpu::ArgumentError>([&] { k.save("/no/such/place"); }),
                 "cannot write /no/such/place"));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 8);
  CHECK(contains(thrown<qpu::ArgumentError>([&] { (void)qpu::runtime::openObject(path); }),
                 "is damaged"));
}

TEST_CASE("settings of compiler and emulator are checked") {
  const Setting s("QPU_BACKEND", "emulator");
  {
    const Setting level("QPU_OPTIMISE", "9");
    CHECK(contains(thrown<qpu::BackendError>([] { (void)compile(scaled); }), "QPU_OPTIMISE=9"));
  }
  {
    const Setting level("QPU_OPTIMISE", "0");
    checkScaled(2);
  }
  {
    const Setting mode("QPU_EMULATOR", "loose");
    CHECK(contains(thrown<qpu::BackendError>([] { checkScaled(1); }),
                   "QPU_EMULATOR=loose: expected strict or lenient"));
  }
  {
    const Setting mode("QPU_EMULATOR", "strict");
    checkScaled(1);
  }
  {
    const Setting limit("QPU_TIMEOUT_MS", "soon");
    CHECK(contains(thrown<qpu::BackendError>([] { checkScaled(1); }), "QPU_TIMEOUT_MS=soon"));
  }
  const Setting board("QPU_BOARD", "Pi 9");
  CHECK(contains(thrown<qpu::BackendError>([] { checkScaled(1); }), "QPU_BOARD=Pi 9"));
}

TEST_CASE("QPU_TIMEOUT_MS ends an endless loop on the emulator") {
  const Setting s("QPU_BACKEND", "emulator");
  const Setting limit("QPU_TIMEOUT_MS", "3");
  auto k = compile([](Ptr<Int> p) {
    Int x = 1;
    While (any(x != 0))
      x = x | 1;
    End
    *p = x;
  }, "endless");
  k.setNumQPUs(12);
  SharedArray<int> out(16);
  const std::string text = thrown<qpu::ExecutionError>([&] { k(&out); });
  CHECK(contains(text, "kernel 'endless', QPU "));
  CHECK(contains(text, "has not finished within 3 ms (1200000 clocks of the modelled pi3). It loops"));
  // The timeout does not affect the next kernel.
  checkScaled(1);
}

TEST_CASE("a lenient emulator warns once and continues") {
  // The program has two stores and a single wait.
  const std::string text =
      "ldi vpm_wr_setup, 0x1a00\nldi vpm, 7\nldi vpm_wr_setup, 0x80904000\nmov r1, uniform\n"
      "mov vpm_st_addr, r1\nmov vpm_st_addr, r1\nnop; read vpm_st_wait\nnop; thrend\nnop\nnop\n";
  const auto words = qpu::runtime::assembleLines(text);
  qpu::runtime::Executable program(std::make_shared<const qpu::code::Object>(
      qpu::runtime::objectOf(words.data(), words.size(), "twice")));
  SharedArray<int> out(16);
  const auto go = [&] {
    program.runStreams(qpu::runtime::Kind::Emulator, {{out.getAddress()}}, false);
  };
  CHECK(contains(thrown<qpu::ExecutionError>(go), "With QPU_EMULATOR=lenient this is a warning"));
  const Setting mode("QPU_EMULATOR", "lenient");
  const std::string said = standardErrorOf([&] {
    go();
    go();
  });
  CHECK(out[15] == 7);
  const std::string warning = "libqpu: warning: kernel 'twice', QPU 0, instruction 5 (mov "
                              "vpm_st_addr, r1): a DMA store is started without";
  CHECK(said.find(warning) == 0);
  CHECK(said.find(warning, 1) == std::string::npos);
}

TEST_CASE("QPU_MODEL accepts fast, slow or a file") {
  const Setting s("QPU_BACKEND", "emulator");
  const auto cycles = [](const char* model) {
    const Setting chosen("QPU_MODEL", model);
    auto k = compile(scaled, "scaled");
    SharedArray<float> x(64);
    k(64, 2, &x);
    return k.cycles();
  };
  const auto plain = cycles("");
  CHECK(cycles("fast").clocks < plain.clocks);
  CHECK(cycles("slow").clocks > plain.clocks);
  CHECK(cycles("slow").mailboxLaunchSeconds > plain.mailboxLaunchSeconds);

  const Folder folder;
  const auto written = [&folder](const char* name, const std::string& text) {
    const std::string path = (folder.path / name).string();
    std::ofstream(path) << text;
    return path;
  };
  const std::string path =
      written("a", "source = emulator\nboard = zero\nstore_ns = 900000\nregisters_launch_us = 7\n");
  const auto c = cycles(path.c_str());
  CHECK(std::string(c.board) == "zero by " + path + ", emulator");
  CHECK(c.seconds() > 1e-3);
  CHECK(c.launches == 1);
  CHECK(c.registersLaunchSeconds == doctest::Approx(7e-6));
  CHECK(std::string(cycles(written("b", "").c_str()).board) ==
        "pi3 by " + (folder.path / "b").string() + ", source not stated");
  CHECK(contains(thrown<qpu::BackendError>([&] { (void)cycles("/no/such/model"); }),
                 "QPU_MODEL=/no/such/model cannot be read"));
  CHECK(contains(thrown<qpu::BackendError>([&] { (void)cycles(folder.path.c_str()); }),
                 "cannot be read"));
  CHECK(contains(thrown<qpu::BackendError>([&] { (void)cycles(written("c", "junk").c_str()); }),
                 "line 1: expected 'name = value'"));
  const Setting board("QPU_BOARD", "pi1");
  CHECK(contains(thrown<qpu::BackendError>([&] { (void)cycles(path.c_str()); }),
                 "is for board zero, but QPU_BOARD is pi1"));
}

TEST_CASE("SHA-256 gives the results of the standard") {
  using qpu::runtime::sha256;
  CHECK(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(sha256(std::string(1000000, 'a')) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("a kernel is compiled once, then cached") {
  const Folder folder;
  const Setting cache("QPU_CACHE", folder.path.string());
  const Setting s("QPU_BACKEND", "emulator");
  qpu::runtime::forgetCompiled();
  const auto before = qpu::runtime::cacheCounts();
  checkScaled(1);
  checkScaled(2);
  CHECK(qpu::runtime::cacheCounts().compiled == before.compiled + 1);
  CHECK(qpu::runtime::cacheCounts().fromMemory == before.fromMemory + 1);
  REQUIRE(folder.files().size() == 1);
  CHECK(folder.files()[0].filename().string().size() == 64 + 5);
  qpu::runtime::forgetCompiled();
  checkScaled(3);
  CHECK(qpu::runtime::cacheCounts().fromDisk == before.fromDisk + 1);
  {
    const Setting level("QPU_OPTIMISE", "0");
    checkScaled(1);
  }
  CHECK(qpu::runtime::cacheCounts().compiled == before.compiled + 2);
  CHECK(folder.files().size() == 2);
}

TEST_CASE("damaged cache files are recompiled") {
  const Folder folder;
  const Setting cache("QPU_CACHE", folder.path.string());
  const Setting s("QPU_BACKEND", "emulator");
  qpu::runtime::forgetCompiled();
  checkScaled(1);
  const auto file = folder.files().at(0);
  const auto size = std::filesystem::file_size(file);
  for (const std::uintmax_t left : {std::uintmax_t{0}, size / 2, size - 1, size}) {
    std::filesystem::resize_file(file, left);
    if (left == size) {
      std::fstream f(file, std::ios::in | std::ios::out | std::ios::binary);
      f.seekp(static_cast<std::streamoff>(size / 2));
      f.put('\x7f');
    }
    qpu::runtime::forgetCompiled();
    const auto before = qpu::runtime::cacheCounts();
    checkScaled(1);
    CHECK(qpu::runtime::cacheCounts().compiled == before.compiled + 1);
    CHECK(std::filesystem::file_size(file) == size);
  }
}

TEST_CASE("an unwritable cache is not an error") {
  const Folder folder;
  const Setting s("QPU_BACKEND", "emulator");
  std::ofstream(folder.path / "file") << "in the way";
  for (const std::string& place :
       {(folder.path / "file" / "below").string(), std::string("/proc/qpu"), std::string("off")}) {
    const Setting cache("QPU_CACHE", place);
    qpu::runtime::forgetCompiled();
    checkScaled(1);
  }
  CHECK(folder.files().size() == 1);
}

TEST_CASE("the cache folder follows the environment") {
  const auto folder = qpu::runtime::cacheFolder;
  unsetenv("QPU_CACHE");
  {
    const Setting xdg("XDG_CACHE_HOME", "/x");
    CHECK(folder() == "/x/pitorch/qpu");
    const Setting own("QPU_CACHE", "/own");
    CHECK(folder() == "/own");
  }
  const Setting off("QPU_CACHE", "off");
  CHECK(folder().empty());
}

TEST_CASE("the least recently used cache files are removed first") {
  const Folder folder;
  const auto now = std::filesystem::file_time_type::clock::now();
  for (int i = 0; i < 10; ++i) {
    const auto path = folder.path / (std::to_string(i) + ".qpuo");
    std::ofstream(path) << std::string(1000, 'x');
    std::filesystem::last_write_time(path, now - std::chrono::minutes(10 - i));
  }
  const auto stray = folder.path / "a.tmp";
  std::ofstream(stray) << "left by a crash";
  std::filesystem::last_write_time(stray, now - std::chrono::hours(2));
  std::ofstream(folder.path / "notes.txt") << std::string(100000, 'x');
  qpu::runtime::pruneCache(folder.path.string(), 10000);
  CHECK(folder.files().size() == 11);
  qpu::runtime::pruneCache(folder.path.string(), 8000);
  CHECK(folder.files().size() == 7);
  CHECK(std::filesystem::exists(folder.path / "notes.txt"));
  CHECK_FALSE(std::filesystem::exists(folder.path / "3.qpuo"));
  CHECK(std::filesystem::exists(folder.path / "4.qpuo"));
}

TEST_CASE("many processes can write one cache") {
  const Folder folder;
  const Setting cache("QPU_CACHE", folder.path.string());
  const Setting s("QPU_BACKEND", "emulator");
  std::vector<pid_t> children;
  for (int c = 0; c < 8; ++c) {
    const pid_t child = fork();
    if (child == 0) {
      for (int round = 0; round < 20; ++round) {
        qpu::runtime::forgetCompiled();
        SharedArray<float> x(16);
        for (float& f : x) f = 2;
        compile(scaled, ("scaled" + std::to_string(round % 4)).c_str())(16, 3, &x);
        for (const float f : x)
          if (f != 6) _exit(1);
      }
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  }
  CHECK(folder.files().size() == 4);
  for (const auto& file : folder.files()) {
    std::ifstream f(file, std::ios::binary);
    const std::string data((std::istreambuf_iterator<char>(f)), std::istreambuf_iterator<char>());
    CHECK(qpu::code::load(data).has_value());
  }
}

TEST_CASE("copies to GPU memory use aligned words") {
  std::array<std::uint32_t, 40> from{}, to{};
  for (std::uint32_t i = 0; i < 40; ++i) from[i] = 100 + i;
  for (std::size_t a = 0; a < 3; ++a)
    for (std::size_t b = 0; b < 3; ++b)
      for (std::size_t n = 0; n < 20; ++n) {
        to.fill(7);
        qpu::runtime::copyDeviceWords(&to[1 + a], &from[b], n);
        for (std::size_t i = 0; i < 40; ++i) {
          const bool in = i >= 1 + a && i < 1 + a + n;
          CHECK(to[i] == (in ? from[b + i - 1 - a] : 7));
        }
      }
}
