// Builds programs for the emulator instruction by instruction.
#ifndef QPU_TESTS_EMULATOR_RUN_HPP
#define QPU_TESTS_EMULATOR_RUN_HPP

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "emu/emulator.hpp"
#include "qpu/error.h"
#include "tests/isa_build.hpp"
#include "tests/support.hpp"

namespace emulator_run {

using namespace isa_build;
using qpu::emu::Launch;
using qpu::emu::Report;
using test::contains;
using Words = std::vector<std::uint32_t>;
using Vector16 = std::array<std::uint32_t, 16>;

constexpr std::uint32_t kIn = 0x40000000;   // bus addresses of two arrays in memory
constexpr std::uint32_t kOut = 0x40100000;
constexpr int kUniform = address::kUniform;

inline std::uint32_t storeSetup(int rows, int length, int y, int x = 0, bool horizontal = true,
                                int mode = 0) {
  return 2U << 30U | static_cast<std::uint32_t>((rows & 127) << 23 | (length & 127) << 16 |
                                                (horizontal ? 1 << 14 : 0) | y << 7 | x << 3 |
                                                mode);
}
inline std::uint32_t storeStride(int bytes, bool packed = false) {
  return 3U << 30U | (packed ? 1U << 16U : 0U) | static_cast<std::uint32_t>(bytes);
}
inline std::uint32_t loadSetup(int rows, int length, int y, int x = 0, bool horizontal = true,
                               int vpmPitch = 1, int mode = 0) {
  return 1U << 31U | static_cast<std::uint32_t>(mode << 28 | (length & 15) << 20 |
                                                (rows & 15) << 16 | (vpmPitch & 15) << 12 |
                                                (horizontal ? 0 : 1 << 11) | y << 4 | x);
}
inline std::uint32_t loadPitch(int bytes) { return 9U << 28U | static_cast<std::uint32_t>(bytes); }
// Returns a setup word for horizontal words with stride 1, starting at row y.
inline std::uint32_t rows32(int y, int number = 0) {
  return 0x1a00U | static_cast<std::uint32_t>(y | number << 20);
}

class Code {
 public:
  Code& operator<<(const Instruction& i) {
    instructions.push_back(i);
    return *this;
  }
  Code& nops(int n) {
    for (int i = 0; i < n; ++i) *this << nop();
    return *this;
  }
  int size() const { return static_cast<int>(instructions.size()); }
  // Adds a relative branch to instruction number `target`, followed by its delay slots.
  Code& branchTo(int target, BranchCond cond = BranchCond::Always) {
    *this << branch(8 * (target - size() - 4), cond);
    return nops(3);
  }
  // Loads the words at `addresses` into r4. Does not change r0..r3.
  Code& tmuLoad(In addresses, int unit = 0) {
    *this << move(to(unit == 0 ? address::kTmu0S : address::kTmu1S), addresses);
    return *this << signal(unit == 0 ? Signal::LoadTmu0 : Signal::LoadTmu1);
  }
  Code& set(Out out, std::uint32_t value) { return *this << load(out, value); }
  // Stores a vector at kOut + 64 * n through VPM row 0.
  Code& store(In value, int n = 0) {
    set(toB(address::kVpmSetup), rows32(0));
    *this << move(to(address::kVpm), value);
    return dmaStore(storeSetup(1, 16, 0), kOut + 64U * static_cast<std::uint32_t>(n));
  }
  Code& dmaStore(std::uint32_t setup, std::uint32_t to) {
    set(toB(address::kVpmSetup), setup);
    set(toB(address::kDmaAddress), to);
    return *this << readB(address::kDmaWait);
  }
  Code& dmaLoad(std::uint32_t setup, std::uint32_t from) {
    set(toA(address::kVpmSetup), setup);
    set(toA(address::kDmaAddress), from);
    return *this << readA(address::kDmaWait);
  }
  Code& end() {
    *this << signal(Signal::End);
    return nops(2);
  }

  std::vector<Instruction> instructions;
};

struct Result {
  Words in;
  Words out;
  Report report;

  Vector16 vector(int n = 0) const {
    Vector16 v{};
    std::memcpy(v.data(), out.data() + 16 * n, sizeof v);
    return v;
  }
};

struct Setting {
  Words in = Words(1024);
  std::size_t outWords = 4096;
  std::vector<Words> uniforms = {{}};
  const qpu::emu::Board* board = nullptr;
  const qpu::code::Object* object = nullptr;
  std::uint64_t limit = 1000000;
  std::uint64_t clockLimit = 0;
  bool lenient = false;
  bool profile = false;
  std::uint32_t codeAddress = 0x50000000;
};

inline Result run(const Code& code, Setting setting = {}) {
  std::vector<qpu::isa::Word> words;
  for (const Instruction& i : code.instructions) words.push_back(qpu::isa::encode(i));
  Result result{std::move(setting.in), Words(setting.outWords), {}};
  Launch launch;
  launch.words = words.data();
  launch.count = words.size();
  launch.codeAddress = setting.codeAddress;
  launch.uniforms = std::move(setting.uniforms);
  const auto region = [](std::uint32_t start, Words& w) {
    return qpu::emu::Region{start, static_cast<std::uint32_t>(4 * w.size()),
                            reinterpret_cast<unsigned char*>(w.data())};
  };
  launch.memory = {region(kIn, result.in), region(kOut, result.out)};
  launch.board = setting.board;
  launch.object = setting.object;
  launch.limit = setting.limit;
  launch.clockLimit = setting.clockLimit;
  launch.lenient = setting.lenient;
  launch.profile = setting.profile;
  result.report = qpu::emu::run(launch);
  return result;
}

// Returns the message of the exception of type E that the code causes.
template <typename E = qpu::ExecutionError>
std::string failure(const Code& code, Setting setting = {}) {
  return test::thrown<E>([&] { (void)run(code, std::move(setting)); });
}

}  // namespace emulator_run

#endif
