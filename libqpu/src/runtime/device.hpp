// The VideoCore of this machine: enables the QPUs, allocates GPU memory and launches programs.
// The state file coordinates it with other processes. Not measured on hardware.
#ifndef QPU_SRC_RUNTIME_DEVICE_HPP
#define QPU_SRC_RUNTIME_DEVICE_HPP

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/board.hpp"
#include "runtime/mailbox.hpp"
#include "runtime/os.hpp"
#include "runtime/root.hpp"
#include "runtime/state.hpp"
#include "runtime/system.hpp"
#include "runtime/v3d.hpp"

namespace qpu::runtime {

// The mask of the physical address in a bus address. The two highest bits are the alias.
constexpr std::uint32_t kPhysicalMask = 0x3fffffff;

// The machine, or a test double of it.
struct Host {
  Os* os = nullptr;
  Root root{"/"};
};

enum class Method : std::uint8_t { Registers, Mailbox };

class Device;

// A mapped allocation of GPU memory. It must not outlive its device.
class GpuMemory {
 public:
  GpuMemory(std::shared_ptr<Device> device, std::size_t slot, std::uint32_t bus,
            std::uint32_t bytes, unsigned char* host)
      : device_(std::move(device)), slot_(slot), bus_(bus), bytes_(bytes), host_(host) {}
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory();

  std::uint32_t bus() const { return bus_; }  // a multiple of 4096
  std::uint32_t bytes() const { return bytes_; }
  unsigned char* host() const { return host_; }

 private:
  friend class Device;
  std::shared_ptr<Device> device_;
  std::size_t slot_;
  std::uint32_t bus_;
  std::uint32_t bytes_;
  unsigned char* host_;
};

// The bus addresses of one QPU's program and uniforms.
struct Start {
  std::uint32_t uniforms = 0;
  std::uint32_t code = 0;
};

// The time limit for a launch: QPU_TIMEOUT_MS, by default 10 s.
std::chrono::milliseconds launchLimit();

class Device : public std::enable_shared_from_this<Device> {
 public:
  // Releases ended processes' resources and enables the QPUs. Throws BackendError; its message
  // contains the fix.
  static std::shared_ptr<Device> open(const Host& host);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  const Board& board() const { return board_; }
  const System& system() const { return system_; }
  const std::string& openingNote() const { return note_; }  // what recover() released, or ""
  // Returns why this launch method does not work, or "" if it does. The first call performs a
  // test launch.
  const std::string& fault(Method method);
  std::uint32_t clockHz();  // of V3D
  std::pair<std::uint32_t, std::uint32_t> identity();  // IDENT0, IDENT1; requires the registers

  // Allocates whole pages, which are not zero-filled. Throws AllocationError.
  std::unique_ptr<GpuMemory> allocate(std::uint32_t bytes, const std::string& purpose);

  // Runs one program per QPU, 1..12, until all have finished. With the mailbox, the programs
  // must raise the host interrupt once, after all of them have finished; `control` is GPU
  // memory of 8 bytes per program. Throws ExecutionError; its message contains `kernel`.
  void launch(Method method, const std::vector<Start>& starts, const GpuMemory& control,
              std::uint32_t controlOffset, const std::string& kernel,
              std::chrono::milliseconds limit = launchLimit());

  // Releases everything; launches and allocations are impossible afterwards. Async-signal-safe
  // and idempotent; has no effect in processes other than the one that opened the device.
  void close() noexcept;

 private:
  friend class GpuMemory;
  explicit Device(const Host& host);

  void recover();
  void enable();
  void openRegisters(std::uint32_t peripherals);
  void requireOpen() const;
  void release(const GpuMemory& memory) noexcept;
  void releaseSlot(std::size_t slot) noexcept;
  void waitForQueue() noexcept;
  void launchByRegisters(const std::vector<Start>& starts, const std::string& kernel,
                         std::chrono::milliseconds limit);
  void launchByMailbox(const std::vector<Start>& starts, const GpuMemory& control,
                       std::uint32_t offset, const std::string& kernel,
                       std::chrono::milliseconds limit);
  std::string afterTimeOut();

  // A live allocation: the handle and, in the upper half, the index of its record plus one.
  using Slot = std::atomic<std::uint64_t>;
  static constexpr std::size_t kMostAllocations = 4096;

  Os& os_;
  Board board_;
  System system_;
  Process self_;
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<State> state_;
  int memory_ = -1;  // /dev/mem
  std::unique_ptr<V3d> v3d_;
  // Indexed by launch method. No value means that the method has not been tested yet.
  std::array<std::optional<std::string>, 2> faults_;
  std::mutex faultMutex_;  // locked before the other mutexes
  std::string note_;
  std::uint32_t memoryFlags_ = 0;
  std::optional<std::size_t> holder_;  // index of this process's record
  std::array<Slot, kMostAllocations> slots_{};
  std::mutex mutex_;        // mailbox, slots, state
  std::mutex launchMutex_;  // locked before mutex_
  std::atomic<bool> launching_{false};
  std::atomic<bool> stuck_{false};  // a program could not be stopped
  std::atomic<bool> closed_{false};
};

}  // namespace qpu::runtime

#endif
