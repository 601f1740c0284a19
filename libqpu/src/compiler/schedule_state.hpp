// The state of the list scheduler in a block: which operations have issued, which operations are
// ready, and which registers hold the values.
#ifndef QPU_SRC_COMPILER_SCHEDULE_STATE_HPP
#define QPU_SRC_COMPILER_SCHEDULE_STATE_HPP

#include <array>
#include <cstdint>
#include <vector>

#include "compiler/schedule.hpp"
#include "compiler/schedule_pressure.hpp"

namespace qpu::compiler {

struct NodeState {
  std::uint32_t pendingEdges = 0;  // number of predecessors that have not issued
  std::int32_t earliest = 0;       // first cycle in which the operation can issue
  std::int32_t stallFree = 0;      // first cycle in which the operation is not expected to stall
  bool done = false;
};

struct ValueState {
  Place main = kNowhere;
  Place copy = kNowhere;
  std::uint32_t reads = 0, updates = 0, rotations = 0;  // numbers of remaining accesses of each kind
  std::uint32_t copyFor = kNone;  // the operation for which the value was copied or moved
  std::array<int, 2> byPipe{};    // remaining reads that only the ADD pipe or only the MUL pipe can perform
};

// The operations that read a value.
struct Users {
  const std::uint32_t* first;
  const std::uint32_t* last;
  const std::uint32_t* begin() const { return first; }
  const std::uint32_t* end() const { return last; }
};

// Operations whose predecessors have all issued. The operation with the longest critical path
// comes first. Operations that write r4 and those that write r5 are kept in separate lists,
// because the operations in each list compete for a single register.
class ReadyLists {
 public:
  explicit ReadyLists(const Graph& graph) : graph_(graph) {}

  const std::vector<std::uint32_t>& others() const { return others_; }
  const std::vector<std::uint32_t>& forR4() const { return forR4_; }
  const std::vector<std::uint32_t>& forR5() const { return forR5_; }
  // The waits for DMA transfers, which are also in others().
  const std::vector<std::uint32_t>& waits() const { return waits_; }

  void insert(std::uint32_t node);
  void remove(std::uint32_t node);

 private:
  std::vector<std::uint32_t>& listOf(std::uint32_t node);
  void insert(std::vector<std::uint32_t>& list, std::uint32_t node) const;
  void remove(std::vector<std::uint32_t>& list, std::uint32_t node) const;
  bool precedes(std::uint32_t x, std::uint32_t y) const {
    const std::int32_t hx = graph_.nodes[x].height;
    const std::int32_t hy = graph_.nodes[y].height;
    return hx != hy ? hx > hy : x < y;
  }

  const Graph& graph_;
  std::vector<std::uint32_t> others_, forR4_, forR5_, waits_;
};

// The number of remaining operations for each pipe.
struct PipeWork {
  std::int32_t add = 0, mul = 0, either = 0;

  void count(const Node& node, int by);
  // Returns a lower bound for the number of instructions that the remaining operations need.
  std::int32_t instructions() const;
};

struct BlockState {
  BlockState(const Graph& blockGraph, const ScheduleOptions& scheduleOptions);

  // --- values ---

  Users users(std::uint32_t v) const {
    const std::uint32_t* first = graph.users.data() + graph.values[v].firstUse;
    return {first, first + graph.values[v].uses};
  }
  bool isNeeded(std::uint32_t v) const {
    return values[v].reads != 0 || values[v].updates != 0 || graph.values[v].liveOut;
  }
  // Returns true if the value was copied or moved for an operation that has not issued.
  bool isHeld(std::uint32_t v) const {
    return values[v].copyFor != kNone && !nodes[values[v].copyFor].done;
  }
  // Returns true if only a few operations read the value and all of them are nearby.
  bool isShortLived(std::uint32_t v) const;
  // Returns true if the value is a rotation amount, which must stay in r5.
  bool isPinned(std::uint32_t v) const;
  // Frees the registers of a value that is no longer needed.
  void release(std::uint32_t v);

  // --- registers ---

  bool isReadable(Place p) const { return p != kNowhere && readableAt[p] <= cycle; }
  void occupy(Place p, std::uint32_t v);
  void vacate(Place p);
  void dropCopy(std::uint32_t v) {
    vacate(values[v].copy);
    values[v].copy = kNowhere;
  }
  // Returns true if the accumulator holds a copy that is not reserved for a pending operation.
  bool isDroppable(Place p) const;
  // Returns a bit mask of the accumulators that are free or droppable.
  std::uint32_t availableAccumulators() const;
  int freeRegisters() const { return __builtin_popcount(freeA) + __builtin_popcount(freeB); }

  // Multiplies the value's remaining reads by `by` and adds the product to the number of reads
  // from the file that contains p.
  void countReads(std::uint32_t v, Place p, int by);
  // Returns the register for which the value's reads are counted. Reads are counted for the value's
  // home register until the value is in another register.
  Place countedAt(std::uint32_t v) const {
    return values[v].main != kNowhere ? values[v].main : graph.values[v].home;
  }
  static bool readsInPipe(const Node& n, std::size_t pipe) {
    return n.rotate == 0 && n.pipes == (pipe == 0 ? kAddPipe : kMulPipe);
  }

  // --- operations ---

  bool isInWindow(std::uint32_t n) const { return n < oldest + options.window; }
  bool canIssue(std::uint32_t n) const { return isInWindow(n) && nodes[n].earliest <= cycle; }
  bool canIssueWithoutStall(std::uint32_t n) const { return canIssue(n) && nodes[n].stallFree <= cycle; }

  const Graph& graph;
  const ScheduleOptions& options;
  std::vector<NodeState> nodes;
  std::vector<ValueState> values;
  std::array<std::uint32_t, kPlaces> occupant{};   // indexed by register: the value in the register
  std::array<std::int32_t, kPlaces> readableAt{};  // indexed by register: first cycle in which it is readable
  // Bit masks of the registers that any value of the block may use.
  std::uint32_t poolA = 0, poolB = 0;
  std::uint32_t freeA = 0, freeB = 0;
  // Remaining reads from files A and B, by the ADD pipe and by the MUL pipe.
  std::array<std::array<int, 2>, 2> fileReads{};
  // Register of the last vector that was read from an I/O address.
  Place lastInput = kNowhere;
  PressureTracker pressure;
  ReadyLists ready;
  PipeWork work;
  std::uint32_t oldest = 0;     // the first operation in source order that has not issued
  std::uint32_t remaining = 0;  // number of operations that have not issued
  std::int32_t cycle = 0;
  int idle = 0;                 // number of consecutive empty instructions up to now
};

}  // namespace qpu::compiler

#endif
