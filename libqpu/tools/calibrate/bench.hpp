// Runs programs of QPU assembly and times them: by the clock of this machine on
// the QPUs, by the model on the emulator.
#ifndef QPU_TOOLS_CALIBRATE_BENCH_HPP
#define QPU_TOOLS_CALIBRATE_BENCH_HPP

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "qpu.h"

namespace qpu::calibrate {

// Lines of assembly. The program reads its uniforms into ra0.. as below, sets r3 to
// the number of rounds and ends as vc4-mailbox wants it.
constexpr const char* kRounds = "ra0";
constexpr const char* kQpu = "ra1";
constexpr const char* kBuffer = "ra2";  // bus address of 4 MB
constexpr std::uint32_t kBufferBytes = 4U << 20U;

class Assembly {
 public:
  Assembly();
  Assembly& operator<<(const std::string& line);
  Assembly& repeat(int times, const std::vector<std::string>& lines);
  Assembly& set(const std::string& to, std::uint32_t value);
  // Runs what `body` adds, r3 times.
  Assembly& loop(const std::function<void(Assembly&)>& body);
  int size() const { return static_cast<int>(lines_.size()); }
  // To the line `target`, with three delay slots.
  Assembly& branch(const std::string& cond, int target);
  // Replaces the lines that were left free for a branch there.
  void patch(int at, const std::string& cond, int target);
  // The ending, and all of it as text.
  std::string end();

 private:
  std::vector<std::string> lines_;
};

// What was timed: per round, without the launch.
struct Time {
  double seconds = 0;
  double spread = 0;  // of the repeats, as a part of the least
};

class Bench {
 public:
  // Throws std::runtime_error when there is no backend that has clocks.
  Bench();

  const std::string& backend() const { return backend_; }
  bool isEmulator() const { return backend_ == "emulator"; }

  // A round of the program on `qpus` QPUs: the difference of runs of n and 2n rounds.
  // On the QPUs there are a hundred times more rounds than on the emulator.
  Time round(const std::string& assembly, int qpus, std::uint32_t rounds);
  // Start and end of a program that does nothing, by this backend.
  Time launch(const std::string& backend);
  // Of all since the last call.
  double worstSpread();
  // One run, the least of several on the QPUs; with the launch there.
  Time run(const std::string& assembly, int qpus, std::uint32_t rounds) const;

 private:
  struct Deleter {
    void operator()(qpu_program* p) const { qpu_program_delete(p); }
    void operator()(qpu_buffer* b) const { qpu_buffer_delete(b); }
  };
  using Program = std::unique_ptr<qpu_program, Deleter>;

  static Program assemble(const std::string& text);
  Time run(qpu_program* program, int qpus, std::uint32_t rounds) const;

  std::string backend_;
  std::unique_ptr<qpu_buffer, Deleter> buffer_;
  double worst_ = 0;
};

}  // namespace qpu::calibrate

#endif
