// Tests the compiler's back end. The emulator runs the code that was generated from machine
// operations. The code must produce the results of these operations.
#include <doctest/doctest.h>

#include <cstring>

#include "compiler/compile.hpp"
#include "emu/emulator.hpp"
#include "fuzz/object.hpp"
#include "isa/verify.hpp"
#include "mir_build.hpp"
#include "qpu/error.h"

namespace {

using mir::Builder;
using mir::Function;
using qpu::code::Object;
using qpu::compiler::emit;
using qpu::compiler::Options;
namespace isa = qpu::isa;

constexpr std::uint32_t kInput = 0xc0010000U;
constexpr std::uint32_t kOutput = 0xc0010800U;
constexpr std::uint32_t kWords = 8192;
constexpr std::uint32_t kSpill = 0xc0020000U;
constexpr std::uint32_t kCode = 0xc0040000U;

std::vector<std::uint32_t> freshMemory() {
  std::vector<std::uint32_t> words(kWords);
  std::mt19937 engine(7);
  for (std::uint32_t& w : words) w = static_cast<std::uint32_t>(engine());
  return words;
}

std::vector<std::uint32_t> expected(const Function& f) {
  mir::Memory memory{kInput, freshMemory()};
  mir::Run run(f, {0, kInput, kOutput}, memory);
  run();
  return memory.words;
}

std::vector<std::uint32_t> emulated(const Object& object) {
  std::vector<std::uint32_t> words = freshMemory();
  std::vector<std::uint32_t> spill(object.spillBytes / 4 + 16);
  const std::array<std::uint32_t, 2> arguments{kInput, kOutput};
  qpu::emu::Launch launch;
  launch.words = object.words.data();
  launch.count = object.words.size();
  launch.codeAddress = kCode;
  launch.uniforms = {qpu::code::uniformStream(object, 0, 1, arguments.data(), kSpill)};
  launch.memory = {
      {kInput, kWords * 4, reinterpret_cast<unsigned char*>(words.data())},
      {kSpill, static_cast<std::uint32_t>(spill.size() * 4),
       reinterpret_cast<unsigned char*>(spill.data())}};
  launch.object = &object;
  launch.limit = 2000000;
  qpu::emu::run(launch);
  return words;
}

Function randomFunction(std::uint32_t seed) {
  mir::RandomOptions random;
  random.variables = 3 + static_cast<int>(seed * 3 % 31);
  random.operations = 20 + static_cast<int>(seed * 11 % 150);
  random.loops = static_cast<int>(seed % 4);
  return mir::Random(seed, random).f;
}

void checkRuns(const Function& f, const Options& options, const std::vector<std::uint32_t>& wanted) {
  CAPTURE(options.level);
  CAPTURE(options.fileRegisters);
  const Object object = emit(f, options);
  std::string fault;
  for (const isa::Fault& broken : isa::verify(object.words)) fault += broken.text + "\n";
  std::vector<std::uint32_t> got;
  try {
    got = emulated(object);
  } catch (const std::exception& e) {
    fault = e.what();
  }
  if (fault.empty() && got == wanted) return;
  std::size_t at = 0;
  while (at < got.size() && got[at] == wanted[at]) ++at;
  FAIL(fault << " first difference at word " << at << "\n" << fuzz::listing(object));
}

struct Counts {
  int instructions = 0, dual = 0, floats = 0;
};

Counts countLoop(const Object& object) {
  // The loop consists of the instructions from the target of the only backward branch to the last
  // delay slot of this branch.
  std::size_t from = 0;
  std::size_t to = 0;
  for (std::size_t k = 0; k < object.words.size(); ++k) {
    const auto i = isa::decode(object.words[k]);
    REQUIRE(i);
    if (i->form != isa::Form::Branch) continue;
    const auto offset = static_cast<std::int32_t>(i->immediate) / 8;
    if (offset >= 0) continue;
    from = static_cast<std::size_t>(static_cast<std::int64_t>(k) + 4 + offset);
    to = k + 4;
  }
  Counts counts;
  for (std::size_t k = from; k < to; ++k) {
    const auto i = isa::decode(object.words[k]);
    ++counts.instructions;
    const bool add = i->opAdd != isa::AddOp::Nop;
    const bool mul = i->opMul != isa::MulOp::Nop;
    counts.dual += add && mul ? 1 : 0;
    counts.floats += (i->opAdd == isa::AddOp::FAdd ? 1 : 0) + (i->opMul == isa::MulOp::FMul ? 1 : 0);
  }
  return counts;
}

}  // namespace

TEST_CASE("random programs compute the same at every level") {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    mir::RandomOptions random;
    random.variables = 3 + static_cast<int>(seed % 23);
    random.operations = 20 + static_cast<int>(seed * 7 % 150);
    random.loops = static_cast<int>(seed % 4);
    const Function f = mir::Random(seed, random).f;
    const std::vector<std::uint32_t> wanted = expected(f);
    for (int level = 0; level <= 2; ++level) checkRuns(f, {level, 32}, wanted);
  }
}

TEST_CASE("random programs with few registers are correct") {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    const Function f = randomFunction(seed);
    const std::vector<std::uint32_t> wanted = expected(f);
    for (const int registers : {4, 5, 6, 8, 12, 20})
      for (const int level : {0, 2}) checkRuns(f, {level, registers}, wanted);
  }
}

TEST_CASE("programs that once exposed spilling bugs are correct") {
  for (const std::uint32_t seed : {32U, 932U, 2200U}) {
    CAPTURE(seed);
    const Function f = randomFunction(seed);
    const std::vector<std::uint32_t> wanted = expected(f);
    for (int level = 0; level <= 2; ++level)
      for (const int registers : {5, 9, 18}) checkRuns(f, {level, registers}, wanted);
  }
}

TEST_CASE("programs with more vectors than registers are correct") {
  for (const int loops : {0, 1}) {
    mir::RandomOptions random;
    random.variables = 200;
    random.operations = 600;
    random.loops = loops;
    const Function f = mir::Random(5, random).f;
    const std::vector<std::uint32_t> wanted = expected(f);
    for (int level = 0; level <= 2; ++level) checkRuns(f, {level, 32}, wanted);
    CHECK(emit(f, {}).spillBytes >= 64U * 100);
  }
}

TEST_CASE("spilling requires a write window that is not kept") {
  mir::RandomOptions random;
  random.variables = 90;
  Function f = mir::Random(5, random).f;
  f.keepsWriteWindow = true;
  CHECK_THROWS_AS(emit(f, {}), qpu::compiler::SpillsNeeded);
}

TEST_CASE("spilling is an error if the kernel sets up the VPM") {
  mir::RandomOptions random;
  random.variables = 90;
  Function f = mir::Random(5, random).f;
  f.usesVpmByHand = true;
  f.name = "crowded";
  std::string text;
  try {
    emit(f, {});
  } catch (const qpu::CompileError& e) {
    text = e.what();
  }
  CHECK(text.find("kernel 'crowded' does not fit into 64 registers: up to 9") == 0);
  CHECK(text.find("because the kernel sets up the VPM") != std::string::npos);
}

TEST_CASE("branches can span more than the instruction cache") {
  mir::RandomOptions random;
  random.variables = 30;
  random.operations = 3000;
  random.loops = 2;
  const Function f = mir::Random(11, random).f;
  const std::vector<std::uint32_t> wanted = expected(f);
  for (int level = 0; level <= 2; ++level) checkRuns(f, {level, 32}, wanted);
  CHECK(emit(f, {}).words.size() * 8 > 2 * 4096);
}

TEST_CASE("VPM loads, mutex, semaphores and interrupt work") {
  Builder b;
  b.f.usesVpmByHand = true;
  const mir::Vreg parts = b.fresh();
  b.push(mir::Op::LoadPerElement, parts).constant = 0xccccaaaaU;  // contains 0, 1, 2, 3 repeatedly
  b.push(mir::Op::MutexAcquire);
  b.setup(mir::Op::VpmReadSetup, 0x80011000U | (9U << 4U));
  b.push(mir::Op::DmaLoadStart).a = mir::Operand::reg(b.input);
  b.push(mir::Op::DmaLoadWait);
  b.setup(mir::Op::VpmReadSetup, 0x00101a00U | 9U);
  const mir::Vreg row = b.fresh();
  b.push(mir::Op::VpmRead, row);
  b.push(mir::Op::SemaphoreRelease).constant = 3;
  const mir::Vreg sum = b.add(isa::AddOp::Add, mir::Operand::reg(row), mir::Operand::reg(parts));
  b.push(mir::Op::SemaphoreAcquire).constant = 3;
  b.store(sum, 64, 9);
  b.push(mir::Op::MutexRelease);
  b.push(mir::Op::HostInterrupt);
  b.block().exit = mir::Block::Exit::End;
  const std::vector<std::uint32_t> wanted = expected(b.f);
  for (int level = 0; level <= 2; ++level) checkRuns(b.f, {level, 32}, wanted);
}

TEST_CASE("both read ports are used for the VPM") {
  constexpr int kVectors = 16;
  constexpr std::uint32_t kRow = 16;
  Builder b;
  b.f.usesVpmByHand = true;
  std::vector<mir::Vreg> sums;
  b.setup(mir::Op::VpmWriteSetup, 0x00001a00U | kRow);
  for (std::uint32_t k = 0; k < kVectors; ++k) {
    const mir::Vreg e = b.elementNumber();
    sums.push_back(b.add(isa::AddOp::Add, mir::Operand::reg(e), mir::Operand::imm(k)));
    b.push(mir::Op::VpmWrite).a = mir::Operand::reg(sums.back());
  }
  const mir::Vreg left = b.load(3);
  b.next();
  ++b.block().loopDepth;
  const std::uint32_t loop = b.at;
  b.setup(mir::Op::VpmReadSetup, 0x00001a00U | kRow);
  const mir::Vreg factor = b.broadcast(sums[3], 5);
  for (const mir::Vreg sum : sums) {
    const mir::Vreg v = b.fresh();
    b.push(mir::Op::VpmRead, v);
    const mir::Vreg product =
        b.mul(isa::MulOp::Mul24, mir::Operand::reg(v), mir::Operand::reg(factor));
    b.add(isa::AddOp::Add, sum, mir::Operand::reg(sum), mir::Operand::reg(product));
  }
  b.add(isa::AddOp::Sub, left, mir::Operand::reg(left), mir::Operand::imm(1));
  b.block().operations.back().setsFlags = true;
  b.next();
  b.f.blocks[loop].exit = mir::Block::Exit::Branch;
  b.f.blocks[loop].cond = isa::BranchCond::AnyZClear;
  b.f.blocks[loop].taken = loop;
  --b.block().loopDepth;
  for (std::uint32_t k = 0; k < kVectors; ++k) b.store(sums[k], 64 * k, 9);
  b.block().exit = mir::Block::Exit::End;
  const std::vector<std::uint32_t> wanted = expected(b.f);
  for (int level = 0; level <= 2; ++level) checkRuns(b.f, {level, 32}, wanted);
  int byA = 0;
  int byB = 0;
  for (const std::uint64_t word : emit(b.f, {}).words) {
    const auto i = isa::decode(word);
    if (i->form != isa::Form::Alu) continue;
    byA += i->raddrA == isa::address::kVpm ? 1 : 0;
    // If the instruction has a small immediate, this number means a rotation.
    byB += i->raddrB == isa::address::kVpm && i->signal != isa::Signal::SmallImmediate ? 1 : 0;
  }
  CHECK(byA + byB == kVectors);
  CHECK(byB > 0);
}

TEST_CASE("instructions carry the site of their first operation") {
  Builder b;
  b.f.sites = {{"first", "first at 1"}, {"second", "second at 2"}};
  const mir::Vreg x = b.elementNumber();
  const mir::Vreg y = b.add(isa::AddOp::Shl, mir::Operand::reg(x), mir::Operand::imm(3));
  b.block().operations.back().site = 0;
  const mir::Vreg z = b.mul(isa::MulOp::Mul24, mir::Operand::reg(x), mir::Operand::reg(x));
  b.block().operations.back().site = 1;
  b.store(b.add(isa::AddOp::Xor, mir::Operand::reg(y), mir::Operand::reg(z)), 0);
  b.block().exit = mir::Block::Exit::End;
  for (const int level : {0, 2}) {
    const Object object = emit(b.f, {level, 32});
    int found = 0;
    for (std::size_t k = 0; k < object.words.size(); ++k) {
      const auto i = isa::decode(object.words[k]);
      const bool shifts = i->opAdd == isa::AddOp::Shl;
      const bool multiplies = i->opMul == isa::MulOp::Mul24;
      found += (shifts ? 1 : 0) + (multiplies ? 1 : 0);
      const std::uint32_t none = Object::kNoSite;
      CHECK(object.siteOf[k] == (shifts ? 0 : multiplies ? 1 : none));
    }
    CHECK(found == 2);
    CHECK(object.sites.size() == 2);
  }
}

TEST_CASE("an empty kernel ends") {
  Builder b;
  b.block().exit = mir::Block::Exit::End;
  const Object object = emit(b.f, {});
  REQUIRE(object.words.size() >= 3);
  CHECK(isa::decode(object.words[object.words.size() - 3])->signal == isa::Signal::End);
  CHECK(object.uniforms.size() == 3);
  CHECK(object.siteOf.size() == object.words.size());
}

TEST_CASE("the inner block of a matrix product fills both pipes") {
  for (const int steps : {1, 2}) {
    const Function f = mir::matrixBlock(8, 4, steps);
    for (int level = 0; level <= 2; ++level) checkRuns(f, {level, 32}, expected(f));
    const Object object = emit(f, {});
    const Counts counts = countLoop(object);
    CHECK(counts.floats == 64 * steps);
    // The MUL pipe executes the products and broadcasts. The ADD pipe executes the sums and the
    // address computations. Either pipe can execute the five requests and the moves of the four
    // results that are used more than once.
    const int ideal = (64 + 8 + 5 + 5 + 5) * steps / 2 + 1;
    MESSAGE(steps << " steps: " << counts.instructions << " instructions, ideal " << ideal << ", "
                  << counts.dual << " dual");
    CHECK(ideal * 100 >= counts.instructions * 75);
  }
}
