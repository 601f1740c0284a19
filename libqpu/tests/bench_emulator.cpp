// Measures how many QPU instructions per second the emulator executes on one core of this host.
// The program is a loop of dual-issue fadd and fmul instructions with loads through both TMUs. It
// runs on 1, 4 and 12 QPUs. This program is not a test; run it manually.
#include <cstdio>
#include <ctime>
#include <vector>

#include "emu/emulator.hpp"
#include "tests/isa_build.hpp"

using namespace isa_build;

namespace {

constexpr std::uint32_t kMemory = 0x40000000;
constexpr std::uint32_t kRounds = 100000;
constexpr std::size_t kWords = 16 * (kRounds + 12 * 64 + 2);

// Each iteration has 15 instructions, of which eleven use both pipes. It makes two 64-byte
// requests, whose addresses advance by one cache line.
std::vector<qpu::isa::Word> program() {
  std::vector<Instruction> p;
  p.push_back(add(AddOp::Shl, toR(0), ra(address::kElementNumber), imm(2)));
  p.push_back(load(toB(10), 64));
  p.push_back(add(AddOp::Add, toA(0), r(0), ra(address::kUniform)));
  p.push_back(move(toA(3), rb(address::kUniform)));
  p.push_back(load(to(address::kTmuNoSwap), 1));
  p.push_back(load(toB(1), 0x3f000000));
  p.push_back(load(toA(2), 0));
  p.push_back(move(to(address::kTmu0S), ra(0)));
  p.push_back(load(toR(1), 64));
  p.push_back(add(AddOp::Add, to(address::kTmu1S), ra(0), r(1)));
  p.push_back(load(toR(0), 0x3f800000));
  p.push_back(load(toR(1), 0x3f800000));
  p.push_back(load(toR(2), 0x3f800000));
  const auto loop = static_cast<int>(p.size());
  const auto pair = [&](int a, int b) {
    p.push_back(both(add(AddOp::FAdd, toR(a), r(a), r(4)), mul(MulOp::FMul, toR(b), r(b), rb(1))));
  };
  p.push_back(signal(Signal::LoadTmu0));
  pair(0, 1);
  pair(2, 0);
  pair(1, 2);
  pair(0, 1);
  p.push_back(signal(Signal::LoadTmu1));
  pair(2, 0);
  pair(1, 2);
  pair(0, 1);
  p.push_back(both(add(AddOp::Add, toA(0), ra(0), rb(10)),
                   mul(MulOp::FMul, toR(2), r(2), r(4))));
  p.push_back(flags(add(AddOp::Sub, toA(3), ra(3), imm(1))));
  p.push_back(branch(8 * (loop - static_cast<int>(p.size()) - 4), BranchCond::AnyZClear));
  p.push_back(both(move(to(address::kTmu0S), ra(0)), mul(MulOp::FMul, toR(1), r(1), rb(1))));
  pair(0, 2);
  p.push_back(both(move(to(address::kTmu1S), ra(0)), mul(MulOp::FMul, toR(1), r(1), rb(1))));
  p.push_back(signal(Signal::LoadTmu0));
  p.push_back(signal(Signal::LoadTmu1));
  p.push_back(signal(Signal::End));
  p.push_back(nop());
  p.push_back(nop());
  std::vector<qpu::isa::Word> words;
  for (const Instruction& i : p) words.push_back(qpu::isa::encode(i));
  return words;
}

}  // namespace

int main() {
  std::vector<std::uint32_t> memory(kWords, 0x3f800000);
  const std::vector<qpu::isa::Word> words = program();
  (void)std::printf("%5s  %12s  %11s  %22s\n", "QPUs", "instructions", "CPU seconds",
                    "million instructions/s");
  for (const std::uint32_t qpus : {1U, 4U, 12U}) {
    qpu::emu::Launch launch;
    launch.words = words.data();
    launch.count = words.size();
    for (std::uint32_t q = 0; q < qpus; ++q)
      launch.uniforms.push_back({kMemory + q * 4096, kRounds});
    launch.memory = {{kMemory, static_cast<std::uint32_t>(4 * memory.size()),
                      reinterpret_cast<unsigned char*>(memory.data())}};
    const std::clock_t start = std::clock();
    const qpu::emu::Report report = qpu::emu::run(launch);
    const double taken = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    (void)std::printf("%5u  %12llu  %11.4f  %22.1f\n", qpus,
                      static_cast<unsigned long long>(report.instructions), taken,
                      1e-6 * static_cast<double>(report.instructions) / taken);
  }
  return 0;
}
