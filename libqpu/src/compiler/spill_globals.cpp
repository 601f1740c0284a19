#include "compiler/spill_globals.hpp"

#include <algorithm>
#include <numeric>

#include "compiler/register_pressure.hpp"

namespace qpu::compiler {
namespace {

// Operations read up to three vectors, and spill code needs a few registers for constants.
constexpr std::uint32_t kLeastLocals = 4;
constexpr std::uint32_t kWantedLocals = 8;
constexpr std::uint64_t kMemoryCost = 10;       // cost of a memory access in operations
// Maximum cost of spilling a vector that passes through a block, in memory accesses per execution
// of the block.
constexpr std::uint64_t kMostPassingCost = 40;

std::uint64_t frequencyOf(const Block& block) {
  std::uint64_t frequency = 1;
  for (std::uint32_t d = 0; d < std::min(block.loopDepth, 5U); ++d) frequency *= 10;
  return frequency;
}

class GlobalSpilling {
 public:
  GlobalSpilling(const Function& function, const Liveness& live,
                 const std::vector<Rematerialisation>& rematerialisations, std::uint32_t limit, bool memory)
      : f_(function), live_(live), rematerialisations_(rematerialisations), memory_(memory),
        room_(limit - (memory ? kSpillRegisters : 0)), spilled_(function.registers, 0) {}

  std::optional<std::vector<char>> run() {
    findCosts();
    std::vector<std::size_t> innermostFirst(f_.blocks.size());
    std::iota(innermostFirst.begin(), innermostFirst.end(), 0U);
    std::stable_sort(innermostFirst.begin(), innermostFirst.end(), [&](std::size_t x, std::size_t y) {
      return f_.blocks[x].loopDepth > f_.blocks[y].loopDepth;
    });
    for (const std::size_t b : innermostFirst)
      if (!relieve(b)) return std::nullopt;
    return std::move(spilled_);
  }

 private:
  void findCosts() {
    const std::size_t n = live_.globals.size();
    cost_.assign(n, 0);
    referenced_.assign(f_.blocks.size(), Bits(n));
    for (std::size_t b = 0; b < f_.blocks.size(); ++b) {
      const std::uint64_t frequency = frequencyOf(f_.blocks[b]);
      const auto count = [&](Vreg v) {
        const std::uint32_t g = live_.indexOf[v];
        if (g == Liveness::kLocal) return;
        cost_[g] += frequency * (canRematerialise(v) ? rematerialisations_[v].operations : kMemoryCost);
        referenced_[b].set(g);
      };
      for (const Operation& o : f_.blocks[b].operations) {
        forEachRead(o, count);
        if (o.target != Operation::kNone && !isUpdate(o)) count(o.target);
      }
    }
    byCost_.resize(n);
    std::iota(byCost_.begin(), byCost_.end(), 0U);
    std::stable_sort(byCost_.begin(), byCost_.end(),
                     [&](std::uint32_t x, std::uint32_t y) { return cost_[x] < cost_[y]; });
  }

  // Spills vectors until the block has enough registers. Returns false if that is impossible.
  bool relieve(std::size_t b) {
    std::uint32_t most = pressure(f_, live_, b);
    std::uint32_t resident = 0;
    const auto isLive = [&](std::size_t g) { return live_.in[b].has(g) || live_.out[b].has(g); };
    const auto passes = [&](std::size_t g) { return !referenced_[b].has(g); };
    for (std::size_t g = 0; g < live_.globals.size(); ++g) {
      if (!isLive(g)) continue;
      if (!isSpilled(g))
        ++resident;
      else if (passes(g) && most > 0)
        --most;
    }
    const auto spill = [&](std::uint32_t g) {
      spilled_[live_.globals[g]] = 1;
      --resident;
      if (passes(g) && most > 0) --most;
    };
    // A spilled vector that only passes through the block needs no spill code here.
    for (const std::uint32_t g : byCost_) {
      if (most <= room_) break;
      if (isLive(g) && passes(g) && canSpill(g) && cost_[g] <= frequencyOf(f_.blocks[b]) * kMostPassingCost) spill(g);
    }
    // A vector that is live into or out of a block occupies its register throughout the block. The
    // live-in and live-out vectors together may therefore need too many registers even if the register
    // pressure is low enough.
    if (most <= room_ && resident + kLeastLocals <= room_) return true;
    const std::uint32_t locals = most > room_ && room_ >= kWantedLocals + 4 ? kWantedLocals : kLeastLocals;
    for (const std::uint32_t g : byCost_) {
      if (resident + locals <= room_) break;
      if (isLive(g) && canSpill(g)) spill(g);
    }
    return resident + kLeastLocals <= room_;
  }

  bool canSpill(std::size_t g) const { return !isSpilled(g) && (memory_ || canRematerialise(live_.globals[g])); }
  bool canRematerialise(Vreg v) const { return rematerialisations_[v].operations != 0; }
  bool isSpilled(std::size_t g) const { return spilled_[live_.globals[g]] != 0; }

  const Function& f_;
  const Liveness& live_;
  const std::vector<Rematerialisation>& rematerialisations_;
  const bool memory_;
  const std::uint32_t room_;
  std::vector<char> spilled_;          // indexed by register
  std::vector<std::uint64_t> cost_;    // indexed by global: the cost of spilling the vector
  std::vector<std::uint32_t> byCost_;  // the globals, sorted by cost
  std::vector<Bits> referenced_;       // indexed by block: globals that the block reads or writes
};

}  // namespace

std::optional<std::vector<char>> chooseSpilledGlobals(const Function& function, const Liveness& live,
                                                      const std::vector<Rematerialisation>& rematerialisations,
                                                      std::uint32_t limit, bool memory) {
  return GlobalSpilling(function, live, rematerialisations, limit, memory).run();
}

}  // namespace qpu::compiler
