// Lowers loads and stores, which go through the TMUs or through the VPM and its DMA engines.
//
// Stores to adjacent addresses can be merged into one DMA transfer. Merging is superword-level
// parallelism (SLP) vectorisation of memory accesses only. Reference: Samuel Larsen and Saman
// Amarasinghe, "Exploiting Superword Level Parallelism with Multimedia Instruction Sets", 2000.
#ifndef QPU_SRC_COMPILER_LOWER_MEMORY_HPP
#define QPU_SRC_COMPILER_LOWER_MEMORY_HPP

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "compiler/lower_context.hpp"
#include "compiler/lower_vpm.hpp"

namespace qpu::compiler {

// A constant plus a linear combination of values. All arithmetic is modulo 2^32.
struct LinearSum {
  std::map<ir::Value, std::uint32_t> times;
  std::uint32_t constant = 0;

  // Adds the product of `factor` and v. If additions, subtractions and left shifts by constants
  // compute v, adds the corresponding multiples of their operands instead.
  void add(const ir::Graph& graph, ir::Value v, std::uint32_t factor, int depth = 0);
  bool operator==(const LinearSum& o) const { return constant == o.constant && times == o.times; }
};

// Facts about a point in the kernel that are valid for every path to that point.
struct MemoryState {
  enum class Pending : std::uint8_t { None, Store, StoreToWaitFor };
  Pending pending = Pending::None;  // the store that may still be in progress, and whether the kernel must wait for it
  bool stored = false;              // true if a store may have been executed
  bool acquired = false;            // true if a semaphore may have been acquired

  void join(const MemoryState& o) {
    pending = std::max(pending, o.pending);
    stored = stored || o.stored;
    acquired = acquired || o.acquired;
  }
  void enterLoop(const Summary& body) {
    if (body.stores) pending = std::max(pending, body.waitsForStore ? Pending::StoreToWaitFor : Pending::Store);
    stored = stored || body.stores;
    acquired = acquired || body.acquires;
  }
};

class MemoryLowering {
 public:
  explicit MemoryLowering(LowerContext& context);

  // Returns true if the kernel contains consecutive stores to adjacent addresses.
  bool foundAdjacent() const { return foundAdjacent_; }

  MemoryState state;

  // Computes the setup words for all loads and stores.
  void prepare();
  ir::Value load(const detail::Statement& s, ir::Value address);
  void store(const detail::Statement& s, ir::Value value, ir::Value address, ir::Value limit);
  // Emits the stores that were deferred for merging.
  void flushStores();
  void waitForStore();

  // --- kernels that set up the VPM themselves ---

  // Combines a constant word with a field that may be computed at run time.
  ir::Value with(std::uint32_t word, ir::Value field);
  void setUp(Op op, Hidden which, ir::Value word);
  void advanceWindow();

 private:
  // Consecutive stores to adjacent addresses.
  struct Stores {
    std::uint32_t count = 0;
    LinearSum end;  // the address after the last vector
    ir::Value address = ir::kNone;
    std::vector<ir::Value> vectors;
    std::vector<std::uint32_t> sites;
    bool wait = false;
  };

  [[noreturn]] void fail(const detail::Statement& s, const std::string& what) const;
  std::uint32_t mostMerged() const;
  bool mergeStore(const detail::Statement& s, ir::Value value, ir::Value address);

  LowerContext& c_;
  VpmByHand byHand_;
  Stores stores_;
  bool foundAdjacent_ = false;
  ir::Value loadSetup_ = ir::kNone;
  ir::Value readWindow_ = ir::kNone;
  std::uint8_t loadUnit_ = 1;
};

}  // namespace qpu::compiler

#endif
