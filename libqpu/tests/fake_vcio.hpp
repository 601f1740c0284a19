// A Raspberry Pi behind the runtime's boundary to the operating system:
// /dev/vcio with its firmware, GPU memory behind /dev/mem, V3D's registers.
// What it keeps is shared with processes forked off after it was made.
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

// A program as it was launched.
struct Launched {
  std::uint32_t uniforms;
  std::uint32_t code;
};

class FakeVcio final : public qpu::runtime::Os {
 public:
  static constexpr std::uint32_t kPhysical = 0x3b000000;  // of GPU memory
  static constexpr std::uint32_t kPeripherals = 0x3f000000;

  enum class Ends : std::uint8_t { Yes, WithoutInterrupt, Never };

  explicit FakeVcio(std::uint32_t gpuBytes = 8U << 20U);
  FakeVcio(const FakeVcio&) = delete;
  FakeVcio& operator=(const FakeVcio&) = delete;
  ~FakeVcio() override;

  // How this Pi is.
  bool refusesQpus = false;         // as under KMS
  bool lacksQpuTags = false;        // as cut-down firmware
  int openVcioError = 0;            // errno
  int openMemError = 0;
  int mapRegistersError = 0;
  int mapMemoryError = 0;
  int ioctlError = 0;
  bool powerless = false;           // V3D stays off in spite of enable
  bool draws = false;               // a control list runs
  bool memoryElsewhere = false;     // /dev/mem shows other memory where the GPU's should be
  bool queueOverflows = false;
  bool stuckAfterTimeOut = false;   // enable is refused after the first disable
  std::uint32_t kernelLimitMs = 0;  // 0: calls may take any time
  // Runs what was launched and says how it ended; empty: the emulator does.
  std::function<Ends(const std::vector<Launched>&)> runs;
  std::string fault;  // of a program, by the emulator; such a program does not end

  // What was seen. `complaints` are breaches of the interface, "" when there are none.
  std::string complaints() const;
  int enabled() const;              // enables less disables
  int enables() const;
  std::size_t allocations() const;  // live handles
  std::uint32_t lastFlags() const;
  std::uint32_t firstHandle() const;
  std::uint32_t launches() const;   // programs
  std::uint32_t cacheClears() const;
  // Host address of bus address `bus`, null when no locked memory has `bytes` there.
  unsigned char* memory(std::uint32_t bus, std::uint32_t bytes) const;
  // Words of the locked piece of memory from `bus` to its end.
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
  std::uint32_t requested_ = 0;
  std::uint32_t completed_ = 0;
  bool l2Clear_ = false;
  bool cachesClear_ = false;
  std::chrono::nanoseconds now_{1};
  int opened_ = 0;
};

// Files of a Pi's system in a directory of their own, and QPU_STATE_DIR in it.
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
