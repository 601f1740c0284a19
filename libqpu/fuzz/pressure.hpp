// Generates a kernel with many live vectors from bytes, and checks the kernel. The kernel is
// compiled at every optimisation level and runs on the emulator and on the interpreter. The
// kernel's results are compared with those that plain C++ computes.
#ifndef QPU_FUZZ_PRESSURE_HPP
#define QPU_FUZZ_PRESSURE_HPP

#include <array>
#include <cstring>
#include <string>

#include "compiler/compile.hpp"
#include "fuzz/object.hpp"
#include "fuzz/pressure_evaluate.hpp"
#include "fuzz/pressure_record.hpp"
#include "interp/machine.hpp"
#include "isa/verify.hpp"
#include "lang/gathers.hpp"
#include "lang/recorder.hpp"

namespace fuzz::pressure {

struct Outcome {
  std::string fault;  // a description of the failure, or "" if there was no failure
  // Clocks in the emulator's model, indexed by level: `clocks` with the kernel's QPU count, `clocksOnOne` with 1 QPU.
  std::array<std::uint64_t, 3> clocks{}, clocksOnOne{};
  std::array<std::uint32_t, 3> spillBytes{};
};

// The arrays that the kernels access.
class Arrays {
 public:
  Arrays() {
    std::uint32_t x = 12345;
    for (std::uint32_t i = 0; i < kInputWords; ++i) {
      x = x * 1664525U + 1013904223U;
      startInts.push_back((x >> 28U) < 4 ? x >> 20U : x ^ x >> 13U);
      // The floats range from 2^-12 to 2^19 and have both signs.
      const std::uint32_t exponent = 115 + (x >> 11U) % 32;
      startFloats.push_back((x & 0x80000000U) | exponent << 23U | (x >> 5U) % (1U << 23U));
    }
    std::memcpy(ints.data(), startInts.data(), 4 * startInts.size());
    std::memcpy(floats.data(), startFloats.data(), 4 * startFloats.size());
    reset();
  }
  void reset() {
    for (std::uint32_t i = 0; i < kMostQpus * kAreaWords; ++i) out[static_cast<int>(i)] = static_cast<int>(i * 7);
  }
  Words area(std::uint32_t qpu) const {
    Words words(kAreaWords);
    std::memcpy(words.data(), out.data() + std::size_t{qpu} * kAreaWords, 4 * words.size());
    return words;
  }

  qpu::SharedArray<int> ints{kInputWords};
  qpu::SharedArray<float> floats{kInputWords};
  qpu::SharedArray<int> out{kMostQpus * kAreaWords};
  Words startInts, startFloats;
};

constexpr std::uint32_t kN = 5, kX = 0xc1040000U;  // the parameters of the kernel; the float x is -8.25

inline qpu::detail::Source record(const Program& program) {
  using qpu::detail::Type;
  const auto function = [&program](qpu::Int n, qpu::Float x, qpu::Ptr<qpu::Int> in, qpu::Ptr<qpu::Float> inFloat,
                                   qpu::Ptr<qpu::Int> out) { Record(program, n, x, in, inFloat, out).run(); };
  qpu::detail::Recorder recorder("pressure", {Type::Int, Type::Float, Type::Address, Type::Address, Type::Address});
  qpu::detail::Call<decltype(function), qpu::Int, qpu::Float, qpu::Ptr<qpu::Int>, qpu::Ptr<qpu::Float>,
                    qpu::Ptr<qpu::Int>>::run(function, qpu::detail::MakeIndices<5>::type());
  qpu::detail::Source source = recorder.finish();
  qpu::detail::checkGathers(source);
  return source;
}

class Check {
 public:
  Check(const std::uint8_t* data, std::size_t size) : program_(Generator(data, size).make()) {}

  Outcome run() {
    const qpu::detail::Source source = record(program_);
    const Inputs inputs{kN, kX, &arrays_.startInts, &arrays_.startFloats};
    for (std::uint32_t q = 0; q < program_.qpus; ++q) {
      expected_.push_back(arrays_.area(q));
      Evaluate(program_, inputs, q, expected_.back()).run();
    }
    try {
      qpu::interp::run(qpu::interp::lower(source), static_cast<int>(program_.qpus), arguments().data(),
                       arguments().size());
      compare("the interpreter", nullptr);
    } catch (const qpu::Error& e) {
      fail(std::string("the interpreter: ") + e.what());
    }
    for (int level = 0; level <= 2 && outcome_.fault.empty(); ++level) compiled(source, level);
    return outcome_;
  }

 private:
  void fail(const std::string& what) {
    if (outcome_.fault.empty())
      outcome_.fault = what + " (" + std::to_string(program_.results.size()) + " vectors, " +
                       std::to_string(program_.qpus) + " QPUs)";
  }
  void compare(const std::string& who, const qpu::code::Object* object) {
    for (std::uint32_t q = 0; q < program_.qpus; ++q) {
      const Words found = arrays_.area(q);
      for (std::size_t i = 0; i < found.size(); ++i) {
        if (found[i] == expected_[q][i]) continue;
        return fail(who + ": word " + std::to_string(i) + " of QPU " + std::to_string(q) + " is " +
                    std::to_string(found[i]) + ", expected " + std::to_string(expected_[q][i]) + "\n" +
                    (object == nullptr ? "" : listing(*object)));
      }
    }
  }
  std::vector<std::uint32_t> arguments() const {
    return {kN, kX, arrays_.ints.getAddress(), arrays_.floats.getAddress(), arrays_.out.getAddress()};
  }

  void compiled(const qpu::detail::Source& source, int level) {
    const std::string who = "level " + std::to_string(level);
    qpu::compiler::Options options;
    options.level = level;
    try {
      const qpu::code::Object object = qpu::compiler::compile(source, options);
      for (const qpu::isa::Fault& f : qpu::isa::verify(object.words))
        return fail(who + ": " + f.rule + ": " + f.text + "\n" + listing(object));
      outcome_.spillBytes[static_cast<std::size_t>(level)] = object.spillBytes;
      arrays_.reset();
      const qpu::emu::Report report = emulate(object, static_cast<int>(program_.qpus), arguments());
      outcome_.clocks[static_cast<std::size_t>(level)] = report.clocks;
      if (!report.hostInterrupt) return fail(who + ": ends without an interrupt");
      compare(who, &object);
      outcome_.clocksOnOne[static_cast<std::size_t>(level)] = emulate(object, 1, arguments()).clocks;
    } catch (const qpu::Error& e) {
      fail(who + ": " + e.what());
    }
  }

  const Program program_;
  Arrays arrays_;
  std::vector<Words> expected_;
  Outcome outcome_;
};

inline Outcome check(const std::uint8_t* data, std::size_t size) { return Check(data, size).run(); }

// Checks kernel number `number`.
inline Outcome check(std::uint32_t number) {
  std::array<std::uint8_t, 4> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(number >> (8 * i));
  return check(bytes.data(), bytes.size());
}

}  // namespace fuzz::pressure

#endif
