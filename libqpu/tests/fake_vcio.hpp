// A simulated Raspberry Pi, which implements the runtime's interface to the operating system:
// /dev/vcio with its firmware, GPU memory through /dev/mem, and the registers of the V3D. Processes
// that are forked later share the simulated Pi's state.
#ifndef TESTS_FAKE_VCIO_HPP
#define TESTS_FAKE_VCIO_HPP

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/device.hpp"
#include "runtime/os.hpp"
#include "tests/folder.hpp"

namespace test {

// A program that was launched.
struct Launched {
  std::uint32_t uniforms;
  std::uint32_t code;
};

class FakeVcio final : public qpu::runtime::Os {
 public:
  static constexpr std::uint32_t kPhysical = 0x3b000000;  // physical address of the GPU memory
  static constexpr std::uint32_t kPeripherals = 0x3f000000;

  enum class Ends : std::uint8_t { Yes, WithoutInterrupt, Never };

  explicit FakeVcio(std::uint32_t gpuBytes = 8U << 20U);
  FakeVcio(const FakeVcio&) = delete;
  FakeVcio& operator=(const FakeVcio&) = delete;
  ~FakeVcio() override;

  // These members set the behaviour of the simulated Pi.
  bool refusesQpus = false;         // the Pi behaves as if KMS were enabled
  bool lacksQpuTags = false;        // the Pi behaves as with the cut-down firmware
  int openVcioError = 0;            // value of errno
  int openMemError = 0;
  int mapRegistersError = 0;
  int mapMemoryError = 0;
  int ioctlError = 0;
  bool powerless = false;           // the V3D stays off after it has been enabled
  std::uint32_t unpowered = 0xdeadbeef;  // value of the registers of a V3D without power
  bool draws = false;               // a control list is running
  bool memoryElsewhere = false;     // /dev/mem maps memory that is not the GPU's
  bool queueOverflows = false;
  bool keepsCounts = false;         // V3D keeps its counts of programs while the QPUs are off
  bool stuckAfterTimeOut = false;   // after the QPUs have been disabled once, enabling them fails
  std::uint32_t kernelLimitMs = 0;  // time limit for a call; 0 means no limit
  // Time on the simulated clock at which programs in V3D's queue end that would otherwise never
  // end. 0 means that they do not end.
  std::chrono::nanoseconds programsEnd{0};
  // Runs the launched programs and returns how they ended. If `runs` is not set, the emulator runs
  // the programs.
  std::function<Ends(const std::vector<Launched>&)> runs;
  std::function<void()> onPause;  // called once, when the process next waits
  std::string fault;  // error of a program on the emulator; a program with an error does not end

  // These functions return the observed behaviour. complaints() lists violations of the
  // interface.
  std::string complaints() const;
  int enabled() const;              // number of times enabled minus number of times disabled
  int enables() const;
  std::size_t allocations() const;  // number of live handles
  std::uint32_t lastFlags() const;
  std::uint32_t firstHandle() const;
  std::uint32_t launches() const;   // number of launched programs
  std::uint32_t cacheClears() const;
  // Returns the host address for bus address `bus`. Returns null if locked memory does not contain
  // `bytes` bytes at this address.
  unsigned char* memory(std::uint32_t bus, std::uint32_t bytes) const;
  // Returns the number of words from `bus` to the end of the locked memory that contains `bus`.
  std::uint32_t wordsFrom(std::uint32_t bus) const;

  int open(const char* path, int flags) noexcept override;
  int close(int fd) noexcept override;
  int ioctl(int fd, unsigned long request, void* data) noexcept override;
  int map(int fd, std::size_t bytes, std::uint32_t offset, void** at) noexcept override;
  int unmap(void* at, std::size_t bytes) noexcept override;
  std::uint32_t load(const volatile std::uint32_t* at) noexcept override;
  void store(volatile std::uint32_t* at, std::uint32_t value) noexcept override;
  void barrier() noexcept override;
  std::chrono::nanoseconds now() noexcept override;
  void pause(std::chrono::nanoseconds time) noexcept override;

  struct Shared;

 private:
  void answer(std::uint32_t* words) noexcept;
  std::uint32_t execute(const std::uint32_t* values, bool& gaveUp) noexcept;
  void complain(const std::string& text) noexcept;
  Ends run(const std::vector<Launched>& programs) noexcept;
  Ends emulate(const std::vector<Launched>& programs);

  Shared* shared_;
  std::uint32_t gpuBytes_;
  unsigned char* memory_;
  std::vector<std::uint32_t> registers_;
  std::vector<Launched> queued_;
  std::uint32_t uniforms_ = 0;
  bool l2Clear_ = false;
  bool cachesClear_ = false;
  std::chrono::nanoseconds now_{1};
  int opened_ = 0;
};

// A temporary directory that contains the system files of a Pi. QPU_STATE_DIR is set to a folder in
// this directory.
class FakeTree {
 public:
  explicit FakeTree(const std::string& soc = "bcm2837");
  FakeTree(const FakeTree&) = delete;
  FakeTree& operator=(const FakeTree&) = delete;
  ~FakeTree();

  FakeTree& file(const std::string& path, const std::string& text);
  qpu::runtime::Host host(FakeVcio& os) const;
  std::string state() const { return (folder_.path / "state").string(); }

 private:
  Folder folder_;
};

}  // namespace test

#endif
