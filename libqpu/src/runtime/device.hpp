// This machine's VideoCore. Enables the QPUs, allocates GPU memory and launches programs. The state
// file coordinates these actions with other processes. This code has not been verified on a board.
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

// The bits of a bus address that contain the physical address. The other bits of a bus address
// select the alias.
constexpr std::uint32_t kPhysicalMask = 0x3fffffff;

// The machine, or a test double for it.
struct Host {
  Os* os = nullptr;
  Root root{"/"};
};

enum class Method : std::uint8_t { Registers, Mailbox };

class Device;

// A mapped allocation of GPU memory. An allocation must not outlive its device.
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

// The bus addresses of the program and of the uniforms with which a QPU starts.
struct Start {
  std::uint32_t uniforms = 0;
  std::uint32_t code = 0;
};

// Returns the time limit for a launch. The limit is QPU_TIMEOUT_MS or, by default, 10 s.
std::chrono::milliseconds launchLimit();

class Device : public std::enable_shared_from_this<Device> {
 public:
  // Releases the resources of processes that have ended, and enables the QPUs. Throws BackendError
  // with a message that says how to fix the error.
  static std::shared_ptr<Device> open(const Host& host);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  const Board& board() const { return board_; }
  const System& system() const { return system_; }
  // Returns a description of what recover() has released, or "".
  const std::string& openingNote() const { return note_; }
  // Returns the reason why this launch method does not work, or "" if it works. The first call
  // performs a test launch.
  const std::string& fault(Method method);
  // Throws BackendError if this process cannot use the QPUs, or can no longer use them.
  void requireOpen() const;
  std::uint32_t clockHz();  // the clock rate of the V3D
  // Returns IDENT0 and IDENT1. Requires access to the registers.
  std::pair<std::uint32_t, std::uint32_t> identity();

  // Allocates complete pages, which are not filled with zeros. Throws AllocationError if the
  // firmware has no memory.
  std::unique_ptr<GpuMemory> allocate(std::uint32_t bytes, const std::string& purpose);

  // Runs one program on each of 1..12 QPUs and returns when all programs have finished. For the
  // mailbox method, the programs must raise the host interrupt once, after all of them have
  // finished. In this case, `control` must also be GPU memory with 8 bytes per program. The time
  // limit is launchLimit(). A test launch has the time limit `testLimit`, and its program accesses
  // only `control`. If the program cannot be stopped, only `control` is not released. Throws
  // ExecutionError with a message that contains `kernel`.
  void launch(Method method, const std::vector<Start>& starts, const GpuMemory& control,
              std::uint32_t controlOffset, const std::string& kernel,
              std::optional<std::chrono::milliseconds> testLimit = std::nullopt);

  // Releases everything. Launches and allocations are not possible afterwards. The function is
  // async-signal-safe and idempotent. close() has an effect only in the process that opened the
  // device.
  void close() noexcept;

 private:
  friend class GpuMemory;
  explicit Device(const Host& host);

  void recover();
  void enable();
  void mapRegisters(std::uint32_t peripherals);
  void checkRegisters();
  void release(const GpuMemory& memory) noexcept;
  void releaseSlot(std::size_t slot) noexcept;
  void waitForQueue() noexcept;
  void waitForOthers(const std::string& kernel);
  void clearQueue();
  [[noreturn]] void raiseOverflow(const std::string& kernel);
  void launchByRegisters(const std::vector<Start>& starts, const std::string& kernel,
                         std::chrono::milliseconds limit);
  void launchByMailbox(const std::vector<Start>& starts, const GpuMemory& control,
                       std::uint32_t offset, const std::string& kernel,
                       std::chrono::milliseconds limit);
  std::string afterTimeOut();

  // Describes a live allocation. The lower half contains the handle, and the upper half contains
  // the record's index plus one. kKept is an allocation that is not released while this process
  // exists. A process that starts later releases it, because its record remains.
  using Slot = std::atomic<std::uint64_t>;
  static constexpr std::uint64_t kKept = 1;
  static constexpr std::size_t kMostAllocations = 4096;

  Os& os_;
  Board board_;
  System system_;
  Process self_;
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<State> state_;
  int memory_ = -1;  // file descriptor of /dev/mem
  std::unique_ptr<V3d> v3d_;
  // Indexed by launch method. If there is no value, the method has not been tested yet.
  std::array<std::optional<std::string>, 2> faults_;
  std::mutex faultMutex_;  // must be locked before the other mutexes
  std::string note_;
  std::uint32_t memoryFlags_ = 0;
  std::optional<std::size_t> holder_;  // index of this process's Holder record
  std::array<Slot, kMostAllocations> slots_{};
  std::mutex mutex_;        // protects the mailbox, the slots and the state
  std::mutex launchMutex_;  // must be locked before mutex_
  const GpuMemory* test_ = nullptr;  // memory of the current launch, if it is a test launch
  std::atomic<bool> launching_{false};
  std::atomic<bool> stuck_{false};  // true if a kernel could not be stopped
  std::atomic<bool> closed_{false};
};

}  // namespace qpu::runtime

#endif
