// Checks that launches do not affect each other, whether they are consecutive or concurrent.
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/emulator_run.hpp"

using namespace emulator_run;

namespace {

struct Work {
  Code code;
  Setting setting;
};

Setting on(std::uint32_t qpus, const qpu::emu::Board& board) {
  Setting setting;
  setting.board = &board;
  setting.uniforms.clear();
  for (std::uint32_t q = 0; q < qpus; ++q) setting.uniforms.push_back({kIn + 256 * q, q});
  return setting;
}

// Loads the addresses of 16 consecutive words, starting at `first`, into r0.
Code vectorAt(std::uint32_t first) {
  Code code;
  code << add(AddOp::Shl, toR(0), ra(address::kElementNumber), imm(2));
  code.set(toR(1), first) << add(AddOp::Add, toR(0), r(0), r(1));
  return code;
}

// Writes every register, flag and VPM row, reads memory through both TMUs, stores to memory while
// it holds the mutex, and uses semaphores between the QPUs.
Work everything(std::uint32_t qpus, const qpu::emu::Board& board) {
  Code code;
  code << add(AddOp::Shl, toR(0), ra(address::kElementNumber), imm(2));
  code << add(AddOp::Add, toR(0), r(0), ra(kUniform)) << move(toR(1), ra(kUniform));
  code.tmuLoad(r(0), 0) << move(toR(2), r(4));
  code.tmuLoad(r(0), 1) << move(toR(3), r(4));
  for (int n = 0; n < 32; ++n)
    code << both(add(AddOp::Add, toA(n), r(1), r(2)), mul(MulOp::V8Max, toB(n), r(3), r(1)));
  code << flags(add(AddOp::Sub, toR(0), r(1), imm(3)));
  code << move(to(address::kR5), r(1));
  code << readA(address::kMutex);
  code.set(toB(address::kVpmSetup), rows32(0));
  for (int n = 0; n < 64; ++n) code << move(to(address::kVpm), r(2));
  code.set(toB(address::kVpmSetup), storeStride(0));
  code.dmaStore(storeSetup(64, 16, 0), kOut);
  code << move(to(address::kMutex), r(0));
  code << semaphore(2, false) << semaphore(2, true);
  return {code.end(), on(qpus, board)};
}

// Stores the initial contents of the registers and of a VPM row.
Work untouched() {
  Code code;
  code.dmaStore(storeSetup(1, 16, 7), kOut);
  code.store(r(0), 1).store(r(3), 2).store(ra(0), 3).store(rb(31), 4).store(r(5), 5);
  return {code.end(), on(1, qpu::emu::kPi3)};
}

// Loads words that are in no cache, and then stores to their addresses.
Work readThenWrite() {
  Code code = vectorAt(kIn);
  code.tmuLoad(r(0)) << move(toR(2), r(4));
  code.store(r(2), 3);
  return {code.end(), on(1, qpu::emu::kPi1)};
}
Work writeThenRead() {
  Code code = vectorAt(kOut + 64 * 3);
  code.store(ra(address::kElementNumber), 3);
  code.tmuLoad(r(0)) << move(toR(2), r(4));
  code.store(r(2), 4);
  return {code.end(), on(1, qpu::emu::kPi1)};
}
Work readOutput() {
  Code code = vectorAt(kOut + 64 * 3);
  code.tmuLoad(r(0)) << move(toR(2), r(4));
  return {code.end(), on(1, qpu::emu::kPi1)};
}
Work profiled() {
  Work work = readThenWrite();
  work.setting.profile = true;
  return work;
}

// Runs a program that fails in this state: the QPU holds the mutex, a semaphore is not 0, a TMU
// contains a result, and a DMA transfer is running.
void failInTheMiddle() {
  Code code;
  code.set(toR(0), kIn) << move(to(address::kTmu0S), r(0)) << semaphore(2, false);
  code << readA(address::kMutex);
  code.set(toB(address::kVpmSetup), storeSetup(1, 16, 0)).set(toB(address::kDmaAddress), kOut);
  CHECK(contains(failure(code.end(), on(1, qpu::emu::kPi2)), "the program ends without waiting for a DMA"));
}

Result alone(const Work& work) {
  // Runs in a new thread, which has not launched anything before.
  return std::async(std::launch::async, [&] { return run(work.code, work.setting); }).get();
}

void checkEqual(const Result& a, const Result& b) {
  CHECK(a.out == b.out);
  CHECK(a.in == b.in);
  CHECK(a.report.instructions == b.report.instructions);
  CHECK(a.report.clocks == b.report.clocks);
  CHECK(a.report.stalledOnTmu == b.report.stalledOnTmu);
  CHECK(a.report.stalledOnVpm == b.report.stalledOnVpm);
  CHECK(a.report.stalledOnOther == b.report.stalledOnOther);
  CHECK(a.report.tmuBytes == b.report.tmuBytes);
  CHECK(a.report.memoryReadBytes == b.report.memoryReadBytes);
  CHECK(a.report.memoryWriteBytes == b.report.memoryWriteBytes);
  CHECK(a.report.hostInterrupt == b.report.hostInterrupt);
  REQUIRE(a.report.perInstruction.size() == b.report.perInstruction.size());
  for (std::size_t i = 0; i < a.report.perInstruction.size(); ++i) {
    CHECK(a.report.perInstruction[i].executed == b.report.perInstruction[i].executed);
    CHECK(a.report.perInstruction[i].stalled == b.report.perInstruction[i].stalled);
  }
}

}  // namespace

TEST_CASE("an earlier launch leaves no state for the next one") {
  const std::vector<Work> works = {
      untouched(),     everything(12, qpu::emu::kPi1), readThenWrite(), readOutput(),
      writeThenRead(), everything(5, qpu::emu::kPi3),  profiled(),      everything(1, qpu::emu::kPiZero2)};
  std::vector<Result> expected;
  for (const Work& work : works) expected.push_back(alone(work));
  for (const std::size_t step : {1U, 3U, 5U}) {
    for (std::size_t n = 0; n < works.size(); ++n) {
      const std::size_t i = n * step % works.size();
      CAPTURE(i);
      checkEqual(run(works[i].code, works[i].setting), expected[i]);
      if (n % 3 == 1) failInTheMiddle();
    }
  }
  const Vector16 zeros{};
  CHECK(expected[0].vector(0) == zeros);
  Vector16 undefined{};
  undefined.fill(0xdeadbeef);
  for (int n = 1; n <= 5; ++n) CHECK(expected[0].vector(n) == undefined);
}

TEST_CASE("errors repeat, and do not affect the next launch") {
  Code stale = vectorAt(kOut + 64 * 3);
  stale.tmuLoad(r(0)) << move(toR(2), r(4));
  stale.store(r(2), 3).tmuLoad(r(0)) << add(AddOp::Add, toR(2), r(4), r(4));
  stale.end();
  const Result expected = alone(writeThenRead());
  for (int n = 0; n < 3; ++n) {
    CHECK(contains(failure(stale), "after a cache had fetched its cache line"));
    const Work next = writeThenRead();
    checkEqual(run(next.code, next.setting), expected);
  }
}

TEST_CASE("concurrent launches share a prepared program") {
  const Work work = everything(4, qpu::emu::kPi3);
  const Result expected = alone(work);
  std::vector<qpu::isa::Word> words;
  for (const Instruction& i : work.code.instructions) words.push_back(qpu::isa::encode(i));
  const auto program = qpu::emu::prepare(words.data(), words.size(), work.setting.codeAddress);
  const auto launches = [&] {
    for (int n = 0; n < 20; ++n) {
      Result result{work.setting.in, Words(work.setting.outWords), {}};
      Launch launch;
      launch.words = words.data();
      launch.count = words.size();
      launch.codeAddress = work.setting.codeAddress;
      launch.program = program.get();
      launch.uniforms = work.setting.uniforms;
      launch.board = work.setting.board;
      launch.memory = {{kIn, static_cast<std::uint32_t>(4 * result.in.size()),
                        reinterpret_cast<unsigned char*>(result.in.data())},
                       {kOut, static_cast<std::uint32_t>(4 * result.out.size()),
                        reinterpret_cast<unsigned char*>(result.out.data())}};
      result.report = qpu::emu::run(launch);
      if (result.out != expected.out || result.report.clocks != expected.report.clocks) return false;
    }
    return true;
  };
  std::vector<std::future<bool>> threads;
  for (int n = 0; n < 4; ++n) threads.push_back(std::async(std::launch::async, launches));
  for (auto& t : threads) CHECK(t.get());
}

TEST_CASE("an invalid jump is an error for any kind of target") {
  for (const bool byRegister : {false, true}) {
    CAPTURE(byRegister);
    for (const bool breaks : {true, false}) {
      CAPTURE(breaks);
      Code code;
      code.set(toA(1), 0) << nop();
      // This branch skips the two instructions after the delay slots.
      Instruction jump = branch(16);
      jump.branchRegister = byRegister;
      jump.branchRegisterA = 1;
      code << jump << nop() << nop();
      code << (breaks ? move(toA(0), r(0)) : nop()) << nop() << nop();
      code << move(toR(1), ra(0));
      code.end();
      Setting setting;
      if (breaks)
        CHECK(contains(failure(code, setting), "is read in the instruction after the one"));
      else
        CHECK(run(code, setting).report.instructions == 10);
    }
  }
}
