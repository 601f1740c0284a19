#include "compiler/spill.hpp"

#include <algorithm>

#include "compiler/liveness.hpp"
#include "compiler/rematerialise.hpp"
#include "compiler/spill_barriers.hpp"
#include "compiler/spill_code.hpp"
#include "compiler/spill_globals.hpp"
#include "error_facts.hpp"

namespace qpu::compiler {
namespace {

constexpr std::uint32_t kMostReads = 3;  // maximum number of vectors that one operation reads

class Spiller {
 public:
  Spiller(Function& function, std::uint32_t limit, bool memory)
      : f_(function), limit_(limit), memory_(memory), live_(findLiveness(function)),
        rematerialisations_(findRematerialisable(function, live_)), code_(function) {}

  bool run(std::uint32_t& bytes) {
    std::optional<std::vector<char>> spilled =
        chooseSpilledGlobals(f_, live_, rematerialisations_, limit_, memory_);
    if (!spilled) return false;
    spilled_ = std::move(*spilled);
    if (memory_) {
      ready_ = code_.addPrologue();
      spilled_.resize(f_.registers, 0);
      rematerialisations_.resize(f_.registers);
      live_.indexOf.resize(f_.registers, Liveness::kLocal);
    }
    for (std::size_t b = 0; b < f_.blocks.size(); ++b)
      if (!rewrite(b)) return false;
    bytes = code_.assignSlots();
    return true;
  }

 private:
  static constexpr std::uint32_t kNever = UINT32_MAX;

  struct State {
    bool resident = false;
    bool stored = false;   // true if memory contains the vector's current content
    bool written = false;  // true if the vector has been written in this block so far
    std::size_t use = 0;   // index of the next use in uses_
  };

  bool canRematerialise(Vreg v) const { return rematerialisations_[v].operations != 0; }
  bool isSpilled(std::size_t g) const { return spilled_[live_.globals[g]] != 0; }

  // Returns true if the vector has a register for the whole block.
  bool isPinned(std::size_t b, Vreg v) const {
    if (code_.isReserved(v)) return true;
    return spilled_[v] == 0 && (live_.liveIn(b, v) || live_.liveOut(b, v));
  }

  // Finds the operations in a block that read each vector.
  void findUses(const std::vector<Operation>& operations) {
    for (std::uint32_t i = 0; i < operations.size(); ++i)
      forEachRead(operations[i], [&](Vreg v) {
        if (uses_[v].empty()) touched_.push_back(v);
        uses_[v].push_back(i);
      });
  }
  std::uint32_t nextUse(std::size_t b, Vreg v, std::uint32_t after) {
    const auto& uses = uses_[v];
    std::size_t& k = state_[v].use;
    while (k < uses.size() && uses[k] < after) ++k;
    if (k < uses.size()) return uses[k];
    return live_.liveOut(b, v) ? kNever - 1 : kNever;
  }

  bool rewrite(std::size_t b) {
    const std::vector<Operation> operations = std::move(f_.blocks[b].operations);
    block_ = b;
    out_.clear();
    out_.reserve(operations.size() * 2);
    uses_.resize(f_.registers);
    state_.assign(f_.registers, {});
    for (const Vreg v : touched_) uses_[v].clear();
    touched_.clear();
    findUses(operations);
    residents_.clear();
    runEnd_ = 0;
    std::uint32_t pinned = memory_ ? kSpillRegisters : 0;
    for (std::size_t g = 0; g < live_.globals.size(); ++g)
      if (!isSpilled(g) && (live_.in[b].has(g) || live_.out[b].has(g))) ++pinned;
    if (pinned + kMostReads > limit_) return false;
    room_ = limit_ - pinned;
    for (std::size_t g = 0; g < live_.globals.size(); ++g)
      if (isSpilled(g) && live_.in[b].has(g))
        state_[live_.globals[g]].stored = !canRematerialise(live_.globals[g]);
    const std::size_t n = operations.size();
    barriers_ = memory_ ? findSpillBarriers(operations, b == 0 ? ready_ : 0)
                        : SpillBarriers{std::vector<char>(n + 1, 0), std::vector<char>(n + 1, 0)};
    for (std::uint32_t i = 0; i < n; ++i)
      if (!rewrite(i, operations)) return false;
    // Store spilled vectors at the end of the block, because the successors expect them in
    // memory.
    for (std::size_t g = 0; g < live_.globals.size(); ++g) {
      const Vreg v = live_.globals[g];
      if (isSpilled(g) && live_.out[b].has(g) && !state_[v].stored && !canRematerialise(v)) {
        if (!state_[v].resident) failWithoutContent(v);
        code_.store(out_, block_, v);
      }
    }
    f_.blocks[b].operations = out_;
    return true;
  }

  bool rewrite(std::uint32_t i, const std::vector<Operation>& operations) {
    const Operation& o = operations[i];
    const std::vector<char>& noStore = barriers_.noStore;
    const std::vector<char>& noReload = barriers_.noReload;
    if (noStore[i] == 0 && noStore[i + 1] != 0) storeAhead(i, operations);
    if (noReload[i] == 0) {
      runEnd_ = i;
      if (noReload[i + 1] != 0 && !reloadAhead(i, operations)) return false;
    }
    busy_.clear();
    forEachRead(o, [&](Vreg v) { busy_.push_back(v); });
    const std::vector<Vreg> reads = busy_;
    for (const Vreg v : reads)
      if (!bringIn(v, i)) return false;
    for (const Vreg v : reads)
      if (!isPinned(block_, v) && state_[v].resident && nextUse(block_, v, i + 1) == kNever) leave(v);
    if (o.target == Operation::kNone) {
      out_.push_back(o);
      return true;
    }
    const Vreg v = o.target;
    const bool needsRegister = !isPinned(block_, v);
    if (needsRegister) {
      if (!state_[v].resident) {
        if (!makeRoom(i)) return false;
        enter(v);
      }
      state_[v].stored = false;
    }
    state_[v].written = true;
    out_.push_back(o);
    if (needsRegister && nextUse(block_, v, i + 1) == kNever) leave(v);
    return true;
  }

  void enter(Vreg v) {
    state_[v].resident = true;
    residents_.push_back(v);
  }
  void leave(Vreg v) {
    state_[v].resident = false;
    residents_.erase(std::find(residents_.begin(), residents_.end(), v));
  }

  [[noreturn]] void failWithoutContent(Vreg v) const {
    detail::raise<CompileError>("kernel '" + f_.name + "': internal compiler error: vector " + std::to_string(v) +
                                    " is needed in block " + std::to_string(block_) +
                                    ", where neither a register nor memory holds it. Please report this with the "
                                    "kernel's source",
                                {f_.name, "", -1, 0});
  }

  // Puts vector v into a register before operation i.
  bool bringIn(Vreg v, std::uint32_t i) {
    if (isPinned(block_, v)) {
      // A live-out vector occupies its register even before the block has written it.
      if (code_.isReserved(v) || live_.liveIn(block_, v) || state_[v].written) return true;
      if (!canRematerialise(v)) failWithoutContent(v);
      return rematerialise(v, i);
    }
    if (state_[v].resident) return true;
    if (canRematerialise(v)) return rematerialise(v, i);
    if (!state_[v].stored) failWithoutContent(v);
    if (barriers_.noReload[i] != 0 || !makeRoom(i)) return false;
    code_.reload(out_, block_, v);
    enter(v);
    return true;
  }

  bool rematerialise(Vreg v, std::uint32_t i) {
    const Operation o = rematerialisations_[v].definition;
    const std::size_t before = busy_.size();
    bool isPossible = true;
    forEachRead(o, [&](Vreg u) {
      isPossible = isPossible && bringIn(u, i);
      busy_.push_back(u);
    });
    if (!isPossible) return false;
    if (isPinned(block_, v)) {
      state_[v].written = true;
    } else {
      if (!makeRoom(i)) return false;
      enter(v);
    }
    out_.push_back(o);
    busy_.resize(before);
    return true;
  }

  // Frees a register for one more vector before operation i.
  bool makeRoom(std::uint32_t i) {
    while (residents_.size() >= room_) {
      Vreg victim = Operation::kNone;
      std::uint64_t best = 0;
      for (const Vreg v : residents_) {
        if (std::find(busy_.begin(), busy_.end(), v) != busy_.end()) continue;
        if (runEnd_ > i && needsMemory(v) && nextUse(block_, v, i) < runEnd_) continue;
        const bool isFree = state_[v].stored || canRematerialise(v);
        if (!isFree && (barriers_.noStore[i] != 0 || !memory_)) continue;
        // Evict the vector whose next use is farthest away. If evicting a vector needs no store,
        // the distance to its next use is multiplied by 1.5.
        std::uint64_t score = std::min<std::uint64_t>(nextUse(block_, v, i), 1U << 24U) * 2;
        if (isFree) score += score / 2 + 1;
        if (score >= best) {
          best = score;
          victim = v;
        }
      }
      if (victim == Operation::kNone) return false;
      evict(victim);
    }
    return true;
  }
  void evict(Vreg v) {
    if (!state_[v].stored && !canRematerialise(v)) {
      code_.store(out_, block_, v);
      state_[v].stored = true;
    }
    leave(v);
  }

  // Stores the vectors that may be evicted during the run of VPM writes that starts at operation
  // i. Within the run, no store can be inserted.
  void storeAhead(std::uint32_t i, const std::vector<Operation>& operations) {
    std::uint32_t end = i + 1;
    std::uint32_t needed = kMostReads;
    for (; end < operations.size() && barriers_.noStore[end] != 0; ++end)
      if (operations[end].target != Operation::kNone) ++needed;
    if (operations[i].target != Operation::kNone) ++needed;
    // Vectors that are reloaded within the run also need registers.
    for (std::uint32_t k = i; k < end; ++k)
      forEachRead(operations[k], [&](Vreg v) {
        if (!isPinned(block_, v) && !state_[v].resident) ++needed;
      });
    std::uint32_t open = room_ > residents_.size() ? room_ - static_cast<std::uint32_t>(residents_.size()) : 0;
    std::vector<std::pair<std::uint32_t, Vreg>> candidates;
    for (const Vreg v : residents_) {
      if (state_[v].stored || canRematerialise(v))
        ++open;
      else
        candidates.emplace_back(nextUse(block_, v, i), v);
    }
    std::sort(candidates.begin(), candidates.end());
    while (open < needed && !candidates.empty()) {
      const Vreg v = candidates.back().second;
      candidates.pop_back();
      code_.store(out_, block_, v);
      state_[v].stored = true;
      ++open;
    }
  }

  // Prepares a run of VPM reads, within which nothing can be reloaded. Before the run, loads those
  // vectors in memory that are read in the run, or that are needed to rematerialise vectors in the
  // run. The loaded vectors stay in registers until they are read.
  bool reloadAhead(std::uint32_t i, const std::vector<Operation>& operations) {
    busy_.clear();
    std::vector<Vreg> defined;
    for (runEnd_ = i; runEnd_ < operations.size() && (runEnd_ == i || barriers_.noReload[runEnd_] != 0); ++runEnd_) {
      const Operation& o = operations[runEnd_];
      forEachRead(o, [&](Vreg v) {
        if (!isPinned(block_, v) && needsMemory(v) && std::find(defined.begin(), defined.end(), v) == defined.end())
          busy_.push_back(v);
      });
      if (o.target != Operation::kNone) defined.push_back(o.target);
    }
    const std::vector<Vreg> needed = busy_;
    return std::all_of(needed.begin(), needed.end(), [&](Vreg v) { return bringIn(v, i); });
  }
  // Returns true if a vector that is not in a register can be restored only by a reload from
  // memory.
  bool needsMemory(Vreg v) const {
    if (!canRematerialise(v)) return true;
    const std::vector<Vreg>& sources = rematerialisations_[v].sources;
    return std::any_of(sources.begin(), sources.end(), [this](Vreg u) { return spilled_[u] != 0; });
  }

  Function& f_;
  std::uint32_t limit_;
  bool memory_;
  Liveness live_;
  std::vector<Rematerialisation> rematerialisations_;  // indexed by register
  // Indexed by register: true if the vector is spilled between blocks.
  std::vector<char> spilled_;
  SpillCode code_;
  std::size_t ready_ = 0;    // number of operations at the start of the entry block after which spilling is possible
  std::size_t block_ = 0;
  std::uint32_t room_ = 0;   // number of registers for vectors that are not pinned
  std::vector<Operation> out_;
  std::vector<std::vector<std::uint32_t>> uses_;
  std::vector<Vreg> touched_, residents_;
  std::vector<Vreg> busy_;    // vectors that currently must not be evicted
  std::uint32_t runEnd_ = 0;  // end of the current run of VPM reads
  std::vector<State> state_;
  SpillBarriers barriers_;
};

}  // namespace

bool spill(Function& function, std::uint32_t limit, bool memory, std::uint32_t& bytes) {
  return Spiller(function, limit, memory).run(bytes);
}

}  // namespace qpu::compiler
