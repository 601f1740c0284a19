// Compiled words on the emulator against the interpreter.
#include <cstdlib>
#include <iostream>
#include <stdexcept>

#include "compiler/compile.hpp"
#include "compiler/mir_text.hpp"
#include "emu/emulator.hpp"
#include "isa/text.hpp"
#include "isa/verify.hpp"
#include "mem/heap.hpp"

// Words that the language makes macros come last.
#include "tests/compiler_cases.hpp"

namespace {

std::string listing(const qpu::code::Object& object) {
  std::string text;
  for (std::size_t i = 0; i < object.words.size(); ++i)
    text += std::to_string(i) + ": " + qpu::isa::disassemble(object.words[i]) + "\n";
  return text;
}

}  // namespace

void execute(const qpu::detail::Source& source, const qpu::compiler::Options& options, int qpus,
             const std::vector<std::uint32_t>& arguments) {
  const qpu::code::Object object = qpu::compiler::compile(source, options);
  if (std::getenv("COMPILER_VERBOSE") != nullptr)
    std::cout << "level " << options.level << " " << text(select(source, options))
              << listing(object);
  for (const qpu::isa::Fault& fault : qpu::isa::verify(object.words))
    FAIL(fault.rule << ": " << fault.text << "\n" << listing(object));
  const auto table = qpu::detail::Heap::instance().table();
  // The spill areas are past all arrays.
  std::vector<std::uint32_t> spills(static_cast<std::size_t>(qpus) * object.spillBytes / 4 + 1);
  qpu::emu::Launch launch;
  for (const auto& block : table->blocks)
    launch.memory.push_back({block->start, block->bytes, block->host});
  constexpr std::uint32_t spillStart = 0xf0000000U;
  launch.memory.push_back({spillStart, static_cast<std::uint32_t>(4 * spills.size()),
                           reinterpret_cast<unsigned char*>(spills.data())});
  launch.words = object.words.data();
  launch.count = object.words.size();
  launch.object = &object;
  launch.limit = 10'000'000;
  for (int i = 0; i < qpus; ++i)
    launch.uniforms.push_back(qpu::code::uniformStream(
        object, i, qpus, arguments.data(),
        spillStart + static_cast<std::uint32_t>(i) * object.spillBytes));
  try {
    const qpu::emu::Report report = qpu::emu::run(launch);
    CHECK(report.hostInterrupt);
  } catch (const qpu::Error& e) {
    FAIL(std::string(e.what()) << "\n" << listing(object) << text(select(source, options)));
  }
}

// Registers so few that values must go to memory between the kernel's own stores.
TEST_CASE("spills between stores") {
  SharedArray<int> in = cases::ints(512), out(16 * 24);
  const auto f = [](Ptr<Int> p, Ptr<Int> r) {
    std::array<Int, 20> v;
    for (int i = 0; i < 20; ++i) {
      gather(p + 16 * i + index());
      receive(v[static_cast<std::size_t>(i)]);
    }
    store(index(), r + 320);
    For (Int n = 0, n < 3, n = n + 1)
      for (Int& x : v) x = x * 3 + v[7];
      store(v[3] + n, r + 336 + (n << 4));
    End
    for (int i = 0; i < 20; ++i) store(v[static_cast<std::size_t>(i)], r + 16 * i);
  };
  const qpu::detail::Source source = test::trace(f);
  const cases::Words uniforms = {cases::word(&in), cases::word(&out)};
  qpu::interp::run(qpu::interp::lower(source), 1, uniforms.data(), uniforms.size());
  const cases::Words expected = cases::wordsOf(out);
  for (int level = 0; level <= 2; ++level) {
    CAPTURE(level);
    std::fill(out.begin(), out.end(), 0);
    qpu::compiler::Options options;
    options.level = level;
    options.fileRegisters = 6;
    CHECK(qpu::compiler::compile(source, options).spillBytes > 0);
    execute(source, options, 1, uniforms);
    CHECK(cases::wordsOf(out) == expected);
  }
}

// Turns of a kernel that each want more vectors than there are registers.
TEST_CASE("spilled vectors that are not wanted at once share their memory") {
  constexpr int count = 120;
  SharedArray<int> in = cases::ints(16 * count), out(12 * 16 * 4);
  const auto turns = [](int number) {
    return test::trace([number](Ptr<Int> p, Ptr<Int> q) {
      for (int turn = 0; turn < number; ++turn) {
        std::vector<Int> v;
        v.reserve(count);
        for (int i = 0; i < count; ++i) v.emplace_back(p[16 * i] + turn);
        Int sum = me();
        for (const Int& x : v) sum = (sum * 3) ^ x;
        for (auto x = v.rbegin(); x != v.rend(); ++x) sum = (sum * 5) ^ *x;
        store(sum, q + 64 * me() + 16 * turn);
      }
    });
  };
  const cases::Words uniforms = {cases::word(&in), cases::word(&out)};
  for (const int level : {0, 2}) {
    CAPTURE(level);
    qpu::compiler::Options options;
    options.level = level;
    const std::uint32_t once = qpu::compiler::compile(turns(1), options).spillBytes;
    const qpu::detail::Source source = turns(4);
    CHECK(once > 64 * 50);
    CHECK(qpu::compiler::compile(source, options).spillBytes < once + once / 4);
    for (const int qpus : {1, 12}) {
      std::fill(out.begin(), out.end(), 0);
      qpu::interp::run(qpu::interp::lower(source), qpus, uniforms.data(), uniforms.size());
      const cases::Words expected = cases::wordsOf(out);
      std::fill(out.begin(), out.end(), 0);
      execute(source, options, qpus, uniforms);
      CHECK(cases::wordsOf(out) == expected);
    }
  }
}
