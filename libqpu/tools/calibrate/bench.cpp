#include "tools/calibrate/bench.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <stdexcept>

namespace qpu::calibrate {
namespace {

constexpr int kDelaySlots = 3;
constexpr int kRepeats = 7;
constexpr int kLaunches = 200;
constexpr std::uint32_t kRoundsFactorOnHardware = 100;

[[noreturn]] void failed() { throw std::runtime_error(qpu_last_error()); }

std::string branchLine(const std::string& cond, int from, int target) {
  return "brr." + cond + " " + std::to_string(8 * (target - from - 1 - kDelaySlots));
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Assembly::Assembly() {
  for (const char* const to : {kRounds, kQpu, kBuffer, "ra31"})
    *this << std::string("mov ") + to + ", uniform";
  *this << std::string("mov r3, ") + kRounds;
}

Assembly& Assembly::operator<<(const std::string& line) {
  lines_.push_back(line);
  return *this;
}

Assembly& Assembly::repeat(int times, const std::vector<std::string>& lines) {
  for (int n = 0; n < times; ++n) lines_.insert(lines_.end(), lines.begin(), lines.end());
  return *this;
}

Assembly& Assembly::set(const std::string& to, std::uint32_t value) {
  return *this << "ldi " + to + ", " + std::to_string(value);
}

Assembly& Assembly::loop(const std::function<void(Assembly&)>& body) {
  const int start = size();
  body(*this);
  *this << "sub.sf r3, r3, 1";
  return branch("anyzc", start);
}

Assembly& Assembly::branch(const std::string& cond, int target) {
  *this << branchLine(cond, size(), target);
  return repeat(kDelaySlots, {"nop"});
}

void Assembly::patch(int at, const std::string& cond, int target) {
  lines_.at(static_cast<std::size_t>(at)) = branchLine(cond, at, target);
}

// Ends the program. On QPU 0, ra31 contains the number of QPUs. QPU 0 waits for the other QPUs and
// then raises the host interrupt. On all other QPUs, ra31 is 0.
std::string Assembly::end() {
  *this << "nop" << "mov.sf r0, ra31";
  const int choice = size();
  repeat(1 + kDelaySlots, {"nop"});
  const int next = size();
  *this << "sub.sf r0, r0, 1";
  const int last = size();
  repeat(1 + kDelaySlots, {"nop"});
  *this << "sacq 15";
  *this << "mov.sf r1, 1";
  branch("allzc", next);
  patch(last, "allzs", size());
  *this << "ldi host_int, 1";
  repeat(1, {"nop; thrend", "nop", "nop"});
  patch(choice, "allzs", size());
  repeat(1, {"srel 15", "nop; thrend", "nop", "nop"});
  std::string text;
  for (const std::string& line : lines_) text += line + "\n";
  return text;
}

Bench::Bench() {
  const char* const name = qpu_backend_name();
  if (name == nullptr) throw std::runtime_error(qpu_backend_reason());
  backend_ = name;
  if (backend_ == "interpreter")
    throw std::runtime_error(
        "the backend is the interpreter, which does not count clocks; use a Raspberry Pi whose "
        "QPUs are available (qpu-info prints what prevents their use), or set QPU_BACKEND=emulator to "
        "read the model's own parameters back");
  buffer_.reset(qpu_buffer_new(kBufferBytes));
  if (!buffer_) failed();
}

Bench::Program Bench::assemble(const std::string& text) {
  const long count = qpu_assemble(text.c_str(), nullptr, 0);
  if (count < 0) failed();
  std::vector<std::uint64_t> words(static_cast<std::size_t>(count));
  (void)qpu_assemble(text.c_str(), words.data(), words.size());
  Program program(qpu_program_from_words(words.data(), words.size(), "calibrate"));
  if (!program) failed();
  return program;
}

Time Bench::run(qpu_program* program, int qpus, std::uint32_t rounds) const {
  std::vector<std::uint32_t> uniforms;
  for (int q = 0; q < qpus; ++q)
    for (const std::uint32_t u : {rounds, static_cast<std::uint32_t>(q),
                                  qpu_buffer_address(buffer_.get()),
                                  static_cast<std::uint32_t>(q == 0 ? qpus : 0)})
      uniforms.push_back(u);
  double least = 0;
  double most = 0;
  for (int n = 0; n < (isEmulator() ? 1 : kRepeats); ++n) {
    const double start = now();
    if (qpu_program_run_raw(program, qpus, uniforms.data(), 4) != 0) failed();
    double seconds = now() - start;
    if (isEmulator()) {
      qpu_cycles cycles{};
      if (qpu_program_cycles(program, &cycles) != 0) failed();
      seconds = cycles.seconds;
    }
    least = n == 0 ? seconds : std::min(least, seconds);
    most = std::max(most, seconds);
  }
  return {least, most - least};
}

Time Bench::run(const std::string& assembly, int qpus, std::uint32_t rounds) const {
  const Program program = assemble(assembly);
  return run(program.get(), qpus, rounds);
}

Time Bench::round(const std::string& assembly, int qpus, std::uint32_t rounds) {
  const Program program = assemble(assembly);
  const std::uint32_t n = isEmulator() ? rounds : rounds * kRoundsFactorOnHardware;
  const Time once = run(program.get(), qpus, n);
  const Time twice = run(program.get(), qpus, 2 * n);
  const double difference = twice.seconds - once.seconds;
  if (!(difference > 0))
    throw std::runtime_error("a program did not take longer with twice as many rounds; check that "
                             "the machine is idle and not throttled");
  const Time time{difference / n, (once.spread + twice.spread) / difference};
  worst_ = std::max(worst_, time.spread);
  return time;
}

Time Bench::launch(const std::string& backend) {
  const Program program = assemble(Assembly().end());
  const std::vector<std::uint32_t> uniforms = {1, 0, qpu_buffer_address(buffer_.get()), 1};
  if (isEmulator()) {
    if (qpu_program_run_raw(program.get(), 1, uniforms.data(), 4) != 0) failed();
    qpu_cycles cycles{};
    if (qpu_program_cycles(program.get(), &cycles) != 0) failed();
    return {backend == "vc4-mailbox" ? cycles.mailbox_launch_seconds
                                     : cycles.registers_launch_seconds,
            0};
  }
  std::vector<double> all;
  for (int n = 0; n < kLaunches; ++n) {
    const double start = now();
    if (qpu_program_run_raw(program.get(), 1, uniforms.data(), 4) != 0) failed();
    all.push_back(now() - start);
  }
  std::sort(all.begin(), all.end());
  const double median = all[all.size() / 2];
  return {median, (all[3 * all.size() / 4] - all[all.size() / 4]) / median};
}

double Bench::worstSpread() {
  const double worst = worst_;
  worst_ = 0;
  return worst;
}

}  // namespace qpu::calibrate
