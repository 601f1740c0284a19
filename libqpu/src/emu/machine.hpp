// The QPUs that run a program, with their registers and peripherals, and the order in which they
// act.
//
// The actors are the QPUs, the load engine and the store engine, in this order. Actors act in the
// order of their clocks. If clocks are equal, the actor with the lower number acts first. A QPU
// runs ahead of the other actors until it accesses shared state. A DMA transfer moves all of its
// data when it starts, although it finishes only later. A TMU request reads memory at the time of
// the request.
#ifndef QPU_SRC_EMU_MACHINE_HPP
#define QPU_SRC_EMU_MACHINE_HPP

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "emu/emulator.hpp"
#include "emu/history.hpp"
#include "emu/memory.hpp"
#include "emu/program.hpp"
#include "emu/timing.hpp"
#include "emu/vpm.hpp"
#include "error_facts.hpp"
#include "qpu/error.h"

namespace qpu::emu {

constexpr std::uint32_t kMaxRequests = 4;  // limit for outstanding requests in one TMU
constexpr std::uint32_t kSemaphores = 16;
constexpr std::uint32_t kSemaphoreMost = 15;
constexpr std::uint32_t kLoadEngine = 12;  // number of an actor; QPUs have the numbers 0..11
constexpr std::uint32_t kStoreEngine = 13;

// The reason why the words of a gather must not be used. It is not an error if the vector stays
// unused, because software-pipelined loops fetch one vector more than they use.
struct Poison {
  enum class Kind : std::uint8_t {
    Outside,
    Stale,      // a cache may contain the old values
    Unordered   // the words may not have been written yet
  };
  Kind kind = Kind::Outside;
  std::uint32_t address = 0;
  std::uint32_t element = 0;
  std::uint32_t instruction = 0;  // the instruction that issued the request
  Tag writer = 0;
};
using PoisonNumber = std::uint32_t;  // 0 means that the value is not poisoned

struct Request {
  Vector words;
  Clock arrives = 0;
  PoisonNumber poison = 0;
};

// A ring buffer of requests.
struct RequestQueue {
  std::array<Request, kMaxRequests> ring;
  std::uint32_t oldest = 0;
  std::uint32_t count = 0;
};

enum class State : std::uint8_t {
  Ready, AtSemaphore, AtMutex, AtLoadWait, AtStoreWait, Ended
};

// The state of a QPU's DMA loads or of its DMA stores.
struct Dma {
  DmaSetup setup;
  bool running = false;   // the engine has not completed the transfer
  bool awaited = true;    // no transfer has been started since the last wait
  Clock ended = 0;
  std::uint32_t startedAt = 0;  // the instruction that started the transfer
  // VPM words that the transfer accesses, one bit per column.
  std::array<std::uint16_t, kVpmRows> words{};
};

struct UniformStream {
  // True if the uniforms are part of the launch, false if they are in memory.
  bool given = false;
  const std::uint32_t* words = nullptr;
  // Index of the next word in `words` if `given` is true, and otherwise the word's bus address.
  std::uint32_t next = 0;
  std::uint32_t count = 0;
  std::uint32_t region = 0;
  std::uint32_t line = UINT32_MAX;       // the cache line that was fetched last
  Clock arrives = 0;
};

struct Qpu {
  Vector* v = nullptr;              // the vectors, indexed by the numbers in namespace slot
  Clock clock = 0;
  std::uint64_t executed = 0;
  std::uint32_t number = 0;
  std::uint32_t next = 0;           // the next instruction
  Mask n = 0, z = 0, c = 0;
  std::uint32_t flow = 0;           // target of the last jump that was executed
  std::uint32_t jump = UINT32_MAX;  // target of the pending jump
  std::uint32_t jumpedAt = 0;
  std::uint32_t line = UINT32_MAX;  // the current instruction cache line
  std::uint32_t region = 0;         // index of the region that was used last
  std::uint32_t awaited = 0;        // number of the semaphore that the QPU waits for
  State state = State::Ready;
  bool careful = false;
  bool leave = false;               // if true, return to the scheduler after this instruction
  bool fetches = false;             // if true, an instruction cache line must be fetched first
  bool ending = false;
  bool noSwap = false;
  Clock readsReady = 0;
  Window reads;
  Window writes;
  UniformStream uniforms;
  Dma load;
  Dma store;
  // The accumulators before the last instruction that has need::kKeepOld.
  std::array<Vector, 6> old{};
  std::array<PoisonNumber, slot::kRegisters> poison{};
  std::uint32_t poisoned = 0;       // number of poisoned registers
  std::array<RequestQueue, 2> tmu;
};

class Machine {
 public:
  // Resets the machine to its state after power-up. The arguments must outlive the run.
  // Consecutive launches can use the same machine.
  void reset(const Launch& launch, const Program& program);
  Report run();

 private:
  template <bool Careful>
  void execute(Qpu& q);
  bool before(Qpu& q, const Op& op, std::uint32_t at);
  bool canProceed(Qpu& q, const Op& op, const isa::Instruction& i);
  bool passSemaphore(Qpu& q, const isa::Instruction& i);
  bool passMutex(Qpu& q);
  bool passDma(Qpu& q, Dma& dma, State waiting);
  bool passEarlierDma(Qpu& q, const Op& op, const isa::Instruction& i);
  void awaited(Qpu& q, Dma& dma);
  void readPort(Qpu& q, std::uint8_t from, bool fileA, std::uint32_t at);
  static void unpackInput(Qpu& q, const isa::Instruction& i);
  void after(Qpu& q, const Op& op, std::uint32_t at, Vector& x, Vector& y);
  void writeResults(Qpu& q, const Op& op, std::uint32_t at, const Vector& x, const Vector& y,
                    Mask whereX, Mask whereY);
  static void setFlags(Qpu& q, const Op& op, const isa::Instruction& i, const Vector& x,
                       const Vector& y, Mask whereX, Mask whereY);
  void requireEqual(const Qpu& q, std::uint32_t at, const Vector& x, const Vector& y,
                    Mask where) const;
  const char* rotatesChanged(const Qpu& q, std::uint32_t at, std::uint32_t before) const;
  void branch(Qpu& q, const Op& op, std::uint32_t at);
  void jump(Qpu& q, std::uint32_t at);
  void end(Qpu& q, std::uint32_t at);
  bool fetch(Qpu& q, std::uint32_t at);

  void writeIo(Qpu& q, std::uint32_t at, bool fileA, std::uint8_t to, const Vector& value,
               Mask where);
  static void writeR5(Qpu& q, bool fileA, const Vector& value, Mask where);
  void request(Qpu& q, std::uint32_t at, unsigned tmu, const Vector& addresses);
  void gatherWord(Qpu& q, std::uint32_t at, Request& r, std::uint32_t element,
                  std::uint32_t from);
  // Returns true if a word that the caches deliver must not be used, and stores the reason in p.
  bool isUnsafe(const Qpu& q, std::uint32_t region, Poison& p) const;
  static void receive(Qpu& q, unsigned tmu);
  static unsigned unitOf(const Qpu& q, unsigned tmu);
  static bool uniformNeedsOrder(const Qpu& q);
  std::uint32_t readUniform(Qpu& q, std::uint32_t at);
  void setupReads(Qpu& q, std::uint32_t at, std::uint32_t word);
  void setupWrites(Qpu& q, std::uint32_t at, std::uint32_t word);
  void setupWindow(Qpu& q, std::uint32_t at, Window& window, std::uint32_t word);
  void requirePitch(const Qpu& q, std::uint32_t at, const char* what, std::uint32_t bytes);
  std::string earlierDma(const Dma& dma) const;
  void setupLoadPitch(Qpu& q, std::uint32_t at, std::uint32_t word);
  void readVpm(Qpu& q, std::uint32_t at, Vector& v);
  void writeVpm(Qpu& q, std::uint32_t at, const Vector& v);
  void tagVpm(const Qpu& q, std::uint32_t at, std::uint32_t word, Tag by);
  void requireVpmOrder(const Qpu& q, std::uint32_t at, std::uint32_t word, const char* accessed);
  void checkRead(const Qpu& q, std::uint32_t at, std::uint32_t region, std::uint32_t from) const;
  void tagMemory(const Qpu& q, std::uint32_t at, std::uint32_t region, std::uint32_t to,
                 std::uint32_t words);
  void startDma(Qpu& q, std::uint32_t at, bool load, std::uint32_t from);
  void moveRow(Qpu& q, std::uint32_t at, Dma& dma, const Transfer& t, std::uint32_t row,
               bool load, std::uint32_t from);
  void wake(Qpu& by, State waiting, std::uint32_t semaphore);
  void releaseMutex(Qpu& q, std::uint32_t at);

  void followPoison(Qpu& q, const Op& op, std::uint32_t at);
  static void setPoison(Qpu& q, std::uint16_t target, PoisonNumber poison, bool whole);
  [[noreturn]] void failTimeOut(const Qpu& q, std::uint32_t at) const;
  [[noreturn]] void failPoisoned(const Qpu& q, std::uint32_t at, PoisonNumber number) const;

  bool ordered(const Qpu& q) const { return key(q.clock, q.number) <= horizon_; }
  static std::uint64_t key(Clock clock, std::uint32_t actor) { return clock << 4U | actor; }
  void stall(Qpu& q, std::uint32_t at, Clock until, std::uint64_t& counter);
  void stepEngine(bool load);
  static std::uint32_t slice(const Qpu& q) { return q.number / 4; }

  const code::Site* siteOf(std::uint32_t at) const;
  std::string describe(std::uint32_t at) const;
  std::string describeWriter(Tag writer) const;
  std::string describe(const Poison& p) const;
  std::string kernel() const;
  std::string messagePrefix(const Qpu& q, std::uint32_t at) const;
  detail::ErrorFacts facts(const Qpu& q, std::uint32_t at, std::uint32_t address) const;
  template <typename E>  // defined in failure.hpp
  [[noreturn]] void fail(const Qpu& q, std::uint32_t at, const std::string& what,
                         std::uint32_t address = 0) const;
  // Reports an undocumented construct that the hardware probably supports. A lenient launch reports
  // the construct as a warning. Any other launch reports an error.
  void reportUncertain(const Qpu& q, std::uint32_t at, const std::string& what,
                       const std::string& assumed);
  [[noreturn]] void failOutside(const Qpu& q, std::uint32_t at, std::uint32_t address,
                                const std::string& what) const;
  [[noreturn]] void deadlock() const;
  void requireBalancedSemaphores() const;

  Vpm vpm_;
  const Launch* launch_ = nullptr;
  const Program* program_ = nullptr;
  Memory memory_;
  History history_;
  Timing timing_;
  Engine loads_{timing_, true};
  Engine stores_{timing_, false};
  std::vector<Qpu> qpus_;
  std::vector<Vector> vectors_;  // the vectors of all QPUs
  std::array<std::uint32_t, kSemaphores> semaphores_{};
  std::array<History::Times, kSemaphores> released_{};
  Qpu* mutexHolder_ = nullptr;
  History::Times mutexReleased_{};
  std::uint64_t horizon_ = 0;
  std::vector<Poison> poisons_;
  std::vector<std::uint32_t> warned_;  // instructions for which a warning was reported
  Report report_;
};

}  // namespace qpu::emu

#endif
