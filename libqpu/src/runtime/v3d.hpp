// The registers of the V3D block, which are accessed through /dev/mem. This code has not been
// verified on a board.
#ifndef QPU_SRC_RUNTIME_V3D_HPP
#define QPU_SRC_RUNTIME_V3D_HPP

#include <cstdint>
#include <string>

#include "runtime/os.hpp"
#include "runtime/root.hpp"

namespace qpu::runtime {

namespace v3d {
constexpr std::uint32_t kIdent0 = 0x000;
constexpr std::uint32_t kIdent1 = 0x004;
constexpr std::uint32_t kScratch = 0x010;
constexpr std::uint32_t kL2Control = 0x020;
constexpr std::uint32_t kSliceCaches = 0x024;
constexpr std::uint32_t kList0 = 0x100;  // CT0CS
constexpr std::uint32_t kList1 = 0x104;
constexpr std::uint32_t kPipelineStatus = 0x130;
constexpr std::uint32_t kProgram = 0x430;   // SRQPC
constexpr std::uint32_t kUniforms = 0x434;  // SRQUA
constexpr std::uint32_t kQueue = 0x43c;     // SRQCS
constexpr std::uint32_t kDebugConfig = 0xe00;
constexpr std::uint32_t kInterruptEnable = 0xe2c;
constexpr std::uint32_t kInterruptLatch = 0xe30;
constexpr std::uint32_t kErrors = 0xf20;

constexpr std::uint32_t kWindow = 0x1000;
constexpr std::uint32_t kIdent = 0x02443356;  // "V3D" and version 2
constexpr std::uint32_t kListRunning = 1U << 5U;
constexpr std::uint32_t kClearL2 = 4;
constexpr std::uint32_t kClearSlices = 0x0f0f0f0f;
// Bits that clear the counts of completed and requested programs, the error flag and the queue.
constexpr std::uint32_t kClearQueue = 1U << 16U | 1U << 8U | 1U << 7U | 1U;
constexpr std::uint32_t kQueueError = 1U << 7U;
}  // namespace v3d

// Returns the address at which the CPU accesses the SoC's peripherals.
std::uint32_t peripheralBase(const Root& root);

class V3d {
 public:
  // `memory` is a file descriptor for /dev/mem. Throws BackendError if the registers cannot be
  // mapped.
  V3d(Os& os, int memory, std::uint32_t peripherals);
  V3d(const V3d&) = delete;
  V3d& operator=(const V3d&) = delete;
  ~V3d();

  std::uint32_t read(std::uint32_t offset) const { return os_.load(window_ + offset / 4); }
  void write(std::uint32_t offset, std::uint32_t value) {
    os_.store(window_ + offset / 4, value);
  }

  // Returns true if the VideoCore IV is powered. Without power, the other registers contain
  // arbitrary values.
  bool powered() const { return read(v3d::kIdent0) == v3d::kIdent; }
  // requirePower() throws BackendError if there is no powered VideoCore IV. requireIdle() throws
  // BackendError if the VideoCore is executing a 3D job.
  void requirePower();
  void requireIdle() const;
  // Returns true if all programs that were queued have finished. V3D must be powered.
  bool finished() const;
  // Returns a string such as "SRQCS 0x..., PCS 0x..., ERRSTAT 0x...".
  std::string state() const;

 private:
  Os& os_;
  volatile std::uint32_t* window_ = nullptr;
};

}  // namespace qpu::runtime

#endif
