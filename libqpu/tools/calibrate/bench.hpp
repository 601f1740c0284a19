// Runs QPU assembly programs and measures their time. On the QPUs, the time is measured with this
// machine's clock. On the emulator, the measured time is the time in the cycle model.
#ifndef QPU_TOOLS_CALIBRATE_BENCH_HPP
#define QPU_TOOLS_CALIBRATE_BENCH_HPP

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "qpu.h"

namespace qpu::calibrate {

// Builds an assembly program. The program reads its uniforms into the registers below, sets r3 to
// the number of rounds, and ends as the vc4-mailbox backend requires.
constexpr const char* kRounds = "ra0";
constexpr const char* kQpu = "ra1";
constexpr const char* kBuffer = "ra2";  // bus address of a buffer with kBufferBytes bytes
constexpr std::uint32_t kBufferBytes = 4U << 20U;

class Assembly {
 public:
  Assembly();
  Assembly& operator<<(const std::string& line);
  Assembly& repeat(int times, const std::vector<std::string>& lines);
  Assembly& set(const std::string& to, std::uint32_t value);
  // Adds a loop with r3 iterations. `body` adds the lines in the loop.
  Assembly& loop(const std::function<void(Assembly&)>& body);
  int size() const { return static_cast<int>(lines_.size()); }
  // Adds a branch to line `target`, followed by three delay slots.
  Assembly& branch(const std::string& cond, int target);
  // Replaces the placeholder in line `at` with a branch.
  void patch(int at, const std::string& cond, int target);
  // Adds the end of the program and returns all lines as text.
  std::string end();

 private:
  std::vector<std::string> lines_;
};

// The time per round, without the launch.
struct Time {
  double seconds = 0;
  double spread = 0;  // spread of the repetitions: (longest - shortest) / time
};

class Bench {
 public:
  // Throws std::runtime_error if the backend does not count clocks.
  Bench();

  const std::string& backend() const { return backend_; }
  bool isEmulator() const { return backend_ == "emulator"; }

  // Returns the time of a round on `qpus` QPUs. The result is the difference between the times of
  // runs with 2n and n rounds, divided by n. The hardware runs 100 times as many rounds as the
  // emulator.
  Time round(const std::string& assembly, int qpus, std::uint32_t rounds);
  // Returns the time that this backend takes to start and end an empty program.
  Time launch(const std::string& backend);
  // Returns the largest spread that has occurred since the last call.
  double worstSpread();
  // Returns the time of a run, including the launch. On the hardware, returns the shortest time of
  // several runs.
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
