// Machine code that can be run on the emulator and on the QPUs.
#ifndef QPU_SRC_RUNTIME_EXECUTABLE_HPP
#define QPU_SRC_RUNTIME_EXECUTABLE_HPP

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "code/object.hpp"
#include "emu/emulator.hpp"
#include "qpu/cycles.h"
#include "runtime/backends.hpp"
#include "runtime/device.hpp"

namespace qpu::runtime {

// Bus addresses that the emulator uses for code and spill areas. These addresses are lower than
// those of SharedArrays.
constexpr std::uint32_t kEmulatedCode = 0x00100000;
constexpr std::uint32_t kEmulatedSpill = 0x10000000;

// Returns the board that the emulator models. The board is QPU_BOARD or, by default, a Pi 3.
// QPU_MODEL selects the board's parameters. For each parameter, "fast" selects the bound of its
// range at which kernels are faster, and "slow" selects the bound at which kernels are slower. Any
// other value is the path of a file. Throws BackendError if a setting is invalid.
const emu::Board& emulatedBoard();

// Returns true if QPU_EMULATOR is "lenient". The default is "strict". Throws BackendError for any
// other value.
bool emulatesLeniently();

// Statistics of the runs on the emulator in this process.
struct EmulatedWork {
  std::uint64_t runs = 0;
  std::uint64_t clocks = 0;     // time in the model
  std::uint64_t qpuClocks = 0;  // clocks summed over the QPUs that were used
  std::uint64_t instructions = 0;
  std::uint64_t stalledOnTmu = 0, stalledOnVpm = 0, stalledOnOther = 0;
  std::uint64_t memoryReadBytes = 0, memoryWriteBytes = 0;
};
EmulatedWork emulatedWork();
// Returns the statistics of the runs that this thread started.
Cycles cyclesOfThread();

class Executable {
 public:
  explicit Executable(std::shared_ptr<const code::Object> object) : object_(std::move(object)) {}

  const code::Object& object() const { return *object_; }

  // Runs the code to completion on `qpus` QPUs. `arguments` contains one word per parameter.
  // `kind` must not be Interpreter.
  void run(Kind kind, int qpus, const std::uint32_t* arguments, bool profile);
  // Runs the code with a separate uniform stream for each QPU.
  void runStreams(Kind kind, std::vector<std::vector<std::uint32_t>> streams, bool profile);

  // Data about the last run on the emulator.
  struct Run {
    const emu::Board* board = nullptr;
    emu::Report report;
  };
  std::shared_ptr<const Run> lastRun() const;  // returns null before the first run
  Cycles cycles() const;
  // The listing includes the execution counts of the last run if that run was profiled.
  std::string listing() const;

 private:
  // The code, the uniforms, the control block and the spill areas in GPU memory.
  struct Image {
    std::shared_ptr<Device> device;
    std::unique_ptr<GpuMemory> memory;
    std::uint32_t stride = 0;    // number of bytes for the uniforms of one QPU
    std::uint32_t uniforms = 0;  // this and the following members are offsets in `memory`
    std::uint32_t control = 0;
    std::uint32_t spill = 0;
  };

  void emulate(std::vector<std::vector<std::uint32_t>> streams, unsigned char* spill,
               bool profile);
  void warn(const std::vector<std::string>& warnings);
  void requireImage(std::size_t words);
  void start(Kind kind, const std::vector<std::vector<std::uint32_t>>& streams);

  std::shared_ptr<const code::Object> object_;
  std::once_flag prepared_;
  std::shared_ptr<const emu::Program> program_;  // set once, by prepared_
  std::mutex mutex_;  // protects image_
  Image image_;
  mutable std::mutex runMutex_;
  std::shared_ptr<const Run> run_;
  std::set<std::string> warned_;  // protected by runMutex_
};

}  // namespace qpu::runtime

#endif
