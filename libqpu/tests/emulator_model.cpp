// Checks that the emulator's cycle model reproduces the measurements on which it is based, and that
// the result of a run depends only on the run's inputs.
#include <algorithm>

#include "emu/model.hpp"
#include "tests/emulator_run.hpp"

using namespace emulator_run;
using qpu::emu::kPi1;

namespace {

constexpr int kTimes = 2000;

double megabytesPerSecond(std::uint64_t bytes, const Report& report) {
  return static_cast<double>(bytes) / report.seconds(kPi1) * 1e-6;
}

// One QPU repeatedly stores or loads the same rows, and waits for each transfer.
double dmaRate(bool load, int rows, int words = 16) {
  Code code;
  const auto setup = toA(address::kVpmSetup);
  code.set(setup, loadPitch(64)).set(toB(address::kVpmSetup), storeStride(0));
  code.set(toR(0), kTimes / 20);
  const int loop = code.size();
  for (int n = 0; n < 20; ++n) {
    if (load)
      code.dmaLoad(loadSetup(rows, words, 0), kIn);
    else
      code.dmaStore(storeSetup(rows, words, 0), kOut);
  }
  code << flags(add(AddOp::Sub, toR(0), r(0), imm(1)));
  code.branchTo(loop, BranchCond::AnyZClear).end();
  Setting setting;
  setting.board = &kPi1;
  return megabytesPerSecond(
      std::uint64_t{4} * kTimes * static_cast<unsigned>(rows) * static_cast<unsigned>(words),
      run(code, setting).report);
}

// Reads `lines` cache lines that are `bytes` apart in two passes, and waits for each load. r2
// contains the address.
Report reads(int lines, std::uint32_t bytes) {
  Code code;
  code.set(toR(1), bytes).set(toR(3), 2);
  const int again = code.size();
  code.set(toR(2), kIn).set(toA(0), static_cast<std::uint32_t>(lines)) << nop();
  const int loop = code.size();
  code.tmuLoad(r(2));
  code << add(AddOp::Add, toR(2), r(2), r(1));
  code << flags(add(AddOp::Sub, toA(0), ra(0), imm(1)));
  code.branchTo(loop, BranchCond::AnyZClear);
  code << flags(add(AddOp::Sub, toR(3), r(3), imm(1)));
  code.branchTo(again, BranchCond::AnyZClear).end();
  Setting setting;
  setting.board = &kPi1;
  setting.in.resize(1U << 20U);
  return run(code, setting).report;
}

// 12 QPUs read equal parts of 3 MB. Each QPU has four 16-word requests in flight.
Code stream(int lines) {
  Code code;
  code << add(AddOp::Shl, toR(2), ra(address::kElementNumber), imm(2));
  code << add(AddOp::Add, toR(2), r(2), ra(kUniform));
  code.set(toR(1), 64).set(toR(3), static_cast<std::uint32_t>(lines - 4));
  for (int n = 0; n < 4; ++n) {
    code << move(to(address::kTmu0S), r(2));
    code << add(AddOp::Add, toR(2), r(2), r(1));
  }
  const int loop = code.size();
  code << signal(Signal::LoadTmu0) << flags(add(AddOp::Sub, toR(3), r(3), imm(1)));
  code << branch(8 * (loop - code.size() - 4), BranchCond::AnyZClear);
  code << move(to(address::kTmu0S), r(2));
  code << add(AddOp::Add, toR(2), r(2), r(1)) << nop();
  for (int n = 0; n < 4; ++n) code << signal(Signal::LoadTmu0);
  return code.end();
}

Setting streamSetting(std::uint32_t qpus, std::uint32_t lines) {
  Setting setting;
  setting.board = &kPi1;
  setting.in.resize(std::size_t{16} * qpus * lines);
  setting.uniforms.clear();
  for (std::uint32_t q = 0; q < qpus; ++q) setting.uniforms.push_back({kIn + 64 * q * lines});
  return setting;
}

bool near(double value, double expected) {
  INFO(value << ", expected about " << expected);
  CHECK(value > 0.9 * expected);
  CHECK(value < 1.1 * expected);
  return value > 0.9 * expected && value < 1.1 * expected;
}

}  // namespace

TEST_CASE("the model reproduces published DMA rates") {
  // The expected rates are Sugizaki's rates without the time for the two or three instructions
  // between a wait and the next start.
  CHECK(near(dmaRate(false, 1), 300 * 213.0 / 245));
  CHECK(near(dmaRate(false, 64), 1090));
  CHECK(near(dmaRate(true, 1), 200 * 80.0 / 89));
  CHECK(near(dmaRate(true, 16), 690));
  // Stores 16 rows of one word, as QPULib stores a vector. QPULib's HeatMap takes 618 ns per
  // vector.
  CHECK(near(dmaRate(false, 16, 1), 64 / 0.65));
}

TEST_CASE("DMA rates follow the memory clock, not the V3D clock") {
  using qpu::emu::kPi3;
  CHECK(kPi3.loadNs == doctest::Approx(kPi1.loadNs * 400 / 450));
  CHECK(kPi3.storeNs == doctest::Approx(kPi1.storeNs * 400 / 450));
  CHECK(kPi3.clocksOfNs(kPi3.loadNs) > 1.4 * kPi1.clocksOfNs(kPi1.loadNs));
}

TEST_CASE("the cost of a load depends on where its line is") {
  // The duration of an iteration is the sum of its instructions' clocks and the stall. In the first
  // pass, the cache lines come from memory.
  const int lines = 32;
  const Report near4k = reads(lines, 64);
  CHECK(near4k.stalledOnTmu / lines == (80 - 4) + (36 - 4));
  const Report apart = reads(lines, 4096 + 64);  // the lines fit into L1 and L2
  CHECK(apart.stalledOnTmu == near4k.stalledOnTmu);
  const Report conflict = reads(2, 4096);  // the lines evict each other from L1 only
  CHECK(conflict.stalledOnTmu / 2 == (80 - 4) + (48 - 4));
  const Report large = reads(2048, 64);  // reads 128 KB
  CHECK(large.stalledOnTmu / 2048 == 2 * (80 - 4));
  CHECK(large.memoryReadBytes >= 2 * 128 * 1024);
}

TEST_CASE("12 QPUs are limited by the bus, one by latency") {
  const std::uint32_t lines = 500;
  const Report all = run(stream(lines), streamSetting(12, lines)).report;
  CHECK(near(megabytesPerSecond(all.tmuBytes, all), 1600));
  CHECK(all.tmuBytes == 12 * 64 * lines);
  CHECK(all.memoryReadBytes >= all.tmuBytes);
  const Report one = run(stream(lines), streamSetting(1, lines)).report;
  CHECK(megabytesPerSecond(one.tmuBytes, one) < 4 * 64 / (80 / 250e6) * 1e-6);
  CHECK(one.stalledOnTmu < all.stalledOnTmu);
}

TEST_CASE("an instruction takes four clocks") {
  Code code;
  const int rounds = 1000;
  code.set(toR(0), rounds);
  const int loop = code.size();
  code << flags(add(AddOp::Sub, toR(0), r(0), imm(1)));
  code.branchTo(loop, BranchCond::AnyZClear).end();
  Setting setting;
  setting.board = &kPi1;
  const Report report = run(code, setting).report;
  CHECK(report.instructions == 5 * rounds + 4);
  CHECK(report.clocks == 4 * report.instructions + report.stalledOnOther);
  CHECK(report.stalledOnOther == 2 * 80);  // fetches of two instruction cache lines
  CHECK(report.seconds(kPi1) == doctest::Approx(static_cast<double>(report.clocks) / 250e6));
}

TEST_CASE("code beyond the instruction cache is fetched repeatedly") {
  const auto stalls = [](int size) {
    Code code;
    code.set(toR(0), 10);
    const int loop = code.size();
    code.nops(size - 10);
    code << flags(add(AddOp::Sub, toR(0), r(0), imm(1)));
    code.branchTo(loop, BranchCond::AnyZClear).end();
    Setting setting;
    setting.board = &kPi1;
    return run(code, setting).report.stalledOnOther;
  };
  CHECK(stalls(500) <= 64 * 80);
  CHECK(stalls(1000) > 10 * 100 * 20);
}

TEST_CASE("profiles attribute clocks to instructions") {
  Code code;
  code.set(toR(0), kIn) << move(to(address::kTmu0S), r(0)) << signal(Signal::LoadTmu0) << nop();
  code.end();
  Setting setting;
  setting.board = &kPi1;
  setting.profile = true;
  const Report report = run(code, setting).report;
  REQUIRE(report.perInstruction.size() == static_cast<std::size_t>(code.size()));
  for (const auto& i : report.perInstruction) CHECK(i.executed == 1);
  CHECK(report.perInstruction[2].stalled == 80 - 4);
  CHECK(report.stalledOnTmu == 80 - 4);
  setting.profile = false;
  CHECK(run(code, setting).report.clocks == report.clocks);
}

TEST_CASE("repeated runs take the same clocks") {
  const Report first = run(stream(100), streamSetting(7, 100)).report;
  for (int n = 0; n < 3; ++n) {
    const Report again = run(stream(100), streamSetting(7, 100)).report;
    CHECK(again.clocks == first.clocks);
    CHECK(again.instructions == first.instructions);
    CHECK(again.stalledOnTmu == first.stalledOnTmu);
    CHECK(again.stalledOnOther == first.stalledOnOther);
  }
}

namespace {

// Returns the parameters of a Pi 1 on which the VPM port, semaphores and opening a page take no
// time. Tests set these times.
qpu::emu::Board bare() {
  qpu::emu::Board b = kPi1;
  b.vpmPortClocks = b.semaphoreClocks = b.pageMissNs = 0;
  return b;
}

Report onBoard(const Code& code, const qpu::emu::Board& board, std::uint32_t qpus) {
  Setting setting;
  setting.board = &board;
  setting.in.resize(1U << 20U);
  setting.uniforms.clear();
  for (std::uint32_t q = 0; q < qpus; ++q) setting.uniforms.push_back({q});
  return run(code, setting).report;
}

}  // namespace

TEST_CASE("QPUs share the VPM port") {
  const int vectors = 16 * 20;
  Code code;
  code << move(toR(0), ra(kUniform));
  code.set(toR(1), 20).set(toR(2), rows32(0, 0));
  const int loop = code.size();
  code << move(toA(address::kVpmSetup), r(2));
  code.nops(3);
  for (int n = 0; n < 16; ++n) code << move(toR(0), ra(address::kVpm));
  code << flags(add(AddOp::Sub, toR(1), r(1), imm(1)));
  code.branchTo(loop, BranchCond::AnyZClear).end();
  qpu::emu::Board board = bare();
  const auto clocks = [&](std::uint32_t qpus) { return onBoard(code, board, qpus).clocks; };
  const auto free = clocks(12);
  const auto alone = clocks(1);
  board.vpmPortClocks = 4;  // the time that a QPU takes to execute an instruction
  CHECK(clocks(1) == alone);
  CHECK(clocks(12) >= 12 * 4 * vectors);
  CHECK(free < 12 * 4 * vectors / 2);
  board.vpmPortClocks = 8;
  CHECK(clocks(1) - alone >= 4 * 14 * 20);
}

TEST_CASE("waiting for a semaphore takes time") {
  const int rounds = 50;
  Code code;
  code.set(toR(1), rounds) << flags(move(toR(0), ra(kUniform)));
  const int choice = code.size();
  code.nops(4);
  const auto pingPong = [&code](bool first) {
    const int loop = code.size();
    for (int n = 0; n < 10; ++n) code << semaphore(0, !first) << semaphore(1, first);
    code << flags(add(AddOp::Sub, toR(1), r(1), imm(1)));
    code.branchTo(loop, BranchCond::AnyZClear).end();
  };
  pingPong(true);
  const int second = code.size();
  pingPong(false);
  code.instructions[static_cast<std::size_t>(choice)] =
      branch(8 * (second - choice - 4), BranchCond::AllZClear);
  qpu::emu::Board board = bare();
  const auto before = onBoard(code, board, 2).clocks;
  board.semaphoreClocks = 25;
  const auto after = onBoard(code, board, 2).clocks;
  CHECK(after - before >= rounds * 9 * 2 * 25);
  CHECK(after - before <= rounds * 10 * 2 * 25);
}

TEST_CASE("opening an SDRAM page takes time") {
  const auto apart = [](const qpu::emu::Board& board, std::uint32_t bytes) {
    Code code;
    code.set(toR(1), bytes).set(toR(2), kIn).set(toR(3), 64);
    const int loop = code.size();
    code.tmuLoad(r(2));
    code << add(AddOp::Add, toR(2), r(2), r(1));
    code << flags(add(AddOp::Sub, toR(3), r(3), imm(1)));
    code.branchTo(loop, BranchCond::AnyZClear);
    return onBoard(code.end(), board, 1).stalledOnTmu;
  };
  constexpr std::uint32_t kSameBank = 8 * 4096 + 64;
  qpu::emu::Board board = bare();
  CHECK(apart(board, kSameBank) == apart(board, 64));
  board.pageMissNs = 40;  // corresponds to 10 clocks
  CHECK(apart(board, kSameBank) - apart(board, 64) >= 62 * 10);
}

TEST_CASE("each parameter's value is within its range") {
  using qpu::emu::Bound;
  for (const char* const name : {"pi1", "zero", "pi2", "pi3", "zero2"}) {
    INFO(name);
    const qpu::emu::Board& value = *qpu::emu::findBoard(name);
    const qpu::emu::Board& fast = *qpu::emu::findBoard(name, Bound::Fast);
    const qpu::emu::Board& slow = *qpu::emu::findBoard(name, Bound::Slow);
    for (const qpu::emu::Parameter& p : qpu::emu::parameters()) {
      INFO(p.name);
      CHECK(value.*p.member >= std::min(fast.*p.member, slow.*p.member));
      CHECK(value.*p.member <= std::max(fast.*p.member, slow.*p.member));
      CHECK(std::string(p.source).size() > 4);
    }
  }
}

TEST_CASE("model files replace parameters") {
  using qpu::emu::applyFile;
  qpu::emu::Board board = kPi1;
  const std::string source = applyFile(
      "# a comment\nsource = measured on hardware: a Pi\nboard = pi3  # which\n\n"
      "store_ns = 12.5\nl2_bytes=65536\r\n",
      "m", false, board);
  CHECK(source == "measured on hardware: a Pi");
  CHECK(std::string(board.name) == "pi3");
  CHECK(board.storeNs == 12.5);
  CHECK(board.l2Bytes == 65536);
  CHECK(board.loadNs == qpu::emu::kPi3.loadNs);
}

TEST_CASE("errors in model files name the line") {
  const auto fault = [](const std::string& text, bool chosen = false) {
    qpu::emu::Board board = kPi1;
    try {
      (void)qpu::emu::applyFile(text, "my.model", chosen, board);
    } catch (const qpu::BackendError& e) {
      return std::string(e.what());
    }
    return std::string("no exception");
  };
  CHECK(contains(fault("\nstore_ns 12\n"), "QPU_MODEL=my.model, line 2: expected 'name = value'"));
  CHECK(contains(fault("store = 12"), "'store' is not a parameter"));
  CHECK(contains(fault("store_ns = 12x"), "expected a number from 0 to 1e+06"));
  CHECK(contains(fault("store_ns = -1"), "'store_ns' is '-1'"));
  CHECK(contains(fault("store_ns = nan"), "expected a number"));
  CHECK(contains(fault("store_ns = inf"), "expected a number"));
  CHECK(contains(fault("store_ns ="), "has no value"));
  CHECK(contains(fault("l1_bytes = 5000"), "expected a power of 2"));
  CHECK(contains(fault("clock_hz = 0"), "expected a number from"));
  CHECK(contains(fault("store_ns = 1\nstore_ns = 2"), "line 2: 'store_ns' is set twice"));
  CHECK(contains(fault("board = pi4"), "'pi4' is not a board"));
  CHECK(contains(fault("store_ns = 1\nboard = pi3"), "must come before"));
  CHECK(contains(fault("board = pi3", true), "is for board pi3, but QPU_BOARD is pi1"));
}

TEST_CASE("boards are found by name") {
  CHECK(qpu::emu::findBoard("pi3") == &qpu::emu::kDefaultBoard);
  CHECK(qpu::emu::findBoard("pi4") == nullptr);
  CHECK(qpu::emu::findBoard("pi1")->peakFlops() == 24e9);
  CHECK(qpu::emu::kPi3.peakFlops() == 38.4e9);
  CHECK(qpu::emu::kPi3.tmuMemoryClocks == 80);
}
