// Generates a kernel from arbitrary bytes. compile() must accept the kernel, or reject it with a
// CompileError or an ArgumentError. An accepted kernel is compiled at every optimisation level.
// qpu::isa::verify must find no fault in the code, except faults that the kernel itself causes by
// its use of the VPM. If the kernel terminates quickly, it runs on the interpreter and on the
// emulator. If the interpreter completes the run, the emulator must produce the same bits as the
// interpreter. If the interpreter reports an error, the emulator may report an error or continue,
// because some of the interpreter's checks have no counterpart in the machine code.
//
// pressure.hpp turns half of the inputs into valid kernels with 30 to 120 live vectors. These
// kernels must compile, and their results must equal those that plain C++ computes.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "compiler/compile.hpp"
#include "fuzz/check.hpp"
#include "fuzz/object.hpp"
#include "fuzz/kernel_maker.hpp"
#include "fuzz/pressure.hpp"
#include "interp/machine.hpp"
#include "isa/text.hpp"
#include "isa/verify.hpp"
#include "lang/gathers.hpp"
#include "lang/recorder.hpp"

namespace {

using qpu::Float;
using qpu::Int;
using qpu::Ptr;
using Words = std::vector<std::uint32_t>;

// Larger kernels take a long time to compile and have not exposed additional faults.
constexpr std::size_t kMostExpressions = 3000;

struct Case {
  int qpus = 1;
  int registers = 32;
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};

struct Arrays {
  qpu::SharedArray<int> in{fuzz::kWords};
  qpu::SharedArray<int> out{fuzz::kWords};
  Words inStart, outStart;

  Arrays() {
    std::uint32_t x = 12345;
    for (int i = 0; i < fuzz::kWords; ++i) {
      x = x * 1664525U + 1013904223U;
      in[i] = static_cast<int>((x >> 28U) < 4 ? x >> 20U : x ^ x >> 13U);
      out[i] = i * 7;
    }
    inStart.assign(in.begin(), in.end());
    outStart.assign(out.begin(), out.end());
  }
  void reset() {
    std::memcpy(in.data(), inStart.data(), 4 * inStart.size());
    std::memcpy(out.data(), outStart.data(), 4 * outStart.size());
  }
  Words words() const {
    Words all(in.begin(), in.end());
    all.insert(all.end(), out.begin(), out.end());
    return all;
  }
};

Arrays& arrays() {
  static Arrays instance;
  return instance;
}

Words uniforms() {
  const std::uint32_t in = arrays().in.getAddress();
  return {5, 0x3fc00000, in, in, arrays().out.getAddress()};
}

// Records the kernel in the same way as compile().
qpu::detail::Source record(const Case& c, fuzz::Facts& facts) {
  using qpu::detail::Type;
  const auto function = [&](Int n, Float x, Ptr<Int> in, Ptr<Float> inFloat, Ptr<Int> out) {
    facts = fuzz::Maker(c.data, c.size).make(n, x, in, inFloat, out);
  };
  qpu::detail::Recorder recorder(
      "fuzz", {Type::Int, Type::Float, Type::Address, Type::Address, Type::Address});
  qpu::detail::Call<decltype(function), Int, Float, Ptr<Int>, Ptr<Float>, Ptr<Int>>::run(
      function, qpu::detail::MakeIndices<5>::type());
  qpu::detail::Source source = recorder.finish();
  qpu::detail::checkGathers(source);
  return source;
}

bool compiles(const Case& c) {
  try {
    (void)qpu::compile(
        [&](Int n, Float x, Ptr<Int> in, Ptr<Float> inFloat, Ptr<Int> out) {
          (void)fuzz::Maker(c.data, c.size).make(n, x, in, inFloat, out);
        },
        "fuzz");
    return true;
  } catch (const qpu::CompileError& e) {
    check(std::strstr(e.what(), "kernel") != nullptr);
  } catch (const qpu::ArgumentError&) {
  }
  return false;
}

bool emulate(const qpu::code::Object& object, const Case& c, std::string& error) {
  try {
    check(fuzz::emulate(object, c.qpus, uniforms()).hostInterrupt);
    return true;
  } catch (const qpu::ExecutionError& e) {
    error = e.what();
    return false;
  }
}

bool interpret(const qpu::interp::Code& code, const Case& c, std::string& error) {
  const Words arguments = uniforms();
  try {
    qpu::interp::run(code, c.qpus, arguments.data(), arguments.size());
    return true;
  } catch (const qpu::ExecutionError& e) {
    error = e.what();
    return false;
  }
}

// Returns true if the compiler is responsible for the fault. The kernel is responsible for setup
// words and for the queues of the VPM, its DMA engines and the TMUs. For example, a kernel that
// requests a vector on only some paths but receives it on all paths is itself responsible for the
// fault.
bool causedByCompiler(const qpu::isa::Fault& fault, bool kernelIsRight) {
  const std::string rule = fault.rule;
  for (const char* const queue : {"setup-", "vpm-", "dma-", "tmu-"})
    if (rule.rfind(queue, 0) == 0) return kernelIsRight;
  return true;
}

[[noreturn]] void differ(const Case& c, int level, const std::string& what) {
  (void)std::fprintf(stderr, "level %d, %d QPUs, %d registers: %s\n", level, c.qpus, c.registers,
                     what.c_str());
  std::abort();
}

void compare(const qpu::detail::Source& source, const fuzz::Facts& facts, Case c) {
  if (facts.onOneQpu) c.qpus = 1;
  std::string error;
  bool ended = false;
  Words expected;
  if (facts.ends) {
    arrays().reset();
    ended = interpret(qpu::interp::lower(source), c, error);
    expected = arrays().words();
  }
  bool isAccepted = false;  // true if a lower level has accepted the kernel
  for (int level = 0; level <= 2; ++level) {
    qpu::compiler::Options options;
    options.level = level;
    options.fileRegisters = c.registers;
    qpu::code::Object object;
    try {
      object = qpu::compiler::compile(source, options);
    } catch (const qpu::CompileError& e) {
      if (std::strstr(e.what(), "internal compiler error") != nullptr) differ(c, level, e.what());
      if (std::getenv("QPU_FUZZ_TELL") != nullptr)
        (void)std::fprintf(stderr, "level %d: %s\n", level, e.what());
      if (isAccepted) differ(c, level, std::string("rejected, but a lower level accepted it: ") + e.what());
      continue;
    }
    isAccepted = true;
    for (const qpu::isa::Fault& f : qpu::isa::verify(object.words))
      if (causedByCompiler(f, ended && facts.queuesInOrder))
        differ(c, level, std::string(f.rule) + ": " + f.text + "\n" + fuzz::listing(object));
    if (!facts.ends) continue;
    arrays().reset();
    const bool emulated = emulate(object, c, error);
    if (!ended || !facts.ordered) continue;
    if (!emulated) differ(c, level, error + "\n" + fuzz::listing(object));
    const Words words = arrays().words();
    for (std::size_t i = 0; i < words.size(); ++i)
      if (words[i] != expected[i])
        differ(c, level, "word " + std::to_string(i) + " is " + std::to_string(words[i]) +
                             ", expected " + std::to_string(expected[i]) + "\n" +
                             fuzz::listing(object));
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  (void)setenv("QPU_BACKEND", "interpreter", 1);
  check(std::freopen("/dev/null", "w", stdout) != nullptr);  // discards the output of kernels
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  if (data[0] >= 128) {
    const fuzz::pressure::Outcome outcome = fuzz::pressure::check(data + 1, size - 1);
    if (outcome.fault.empty()) return 0;
    (void)std::fprintf(stderr, "%s\n", outcome.fault.c_str());
    std::abort();
  }
  Case c;
  c.qpus = 1 + data[0] % 4;
  c.registers = data[1] < 192 ? 32 : 4 + data[1] % 29;
  c.data = data + 2;
  c.size = size - 2;
  if (!compiles(c)) return 0;
  fuzz::Facts facts;
  const qpu::detail::Source source = record(c, facts);
  if (source.expressions.size() <= kMostExpressions) compare(source, facts, c);
  return 0;
}
