#include "compiler/spill_slots.hpp"

#include <algorithm>
#include <cstddef>

#include "compiler/liveness.hpp"

namespace qpu::compiler {
namespace {

constexpr std::uint32_t kNoSlot = UINT32_MAX;

class SlotColouring {
 public:
  SlotColouring(const Function& function, const std::vector<SlotAccess>& accesses)
      : function_(function), accesses_(accesses), numberOf_(function.registers, kNoSlot) {
    // Vectors are numbered in the order of their first access. In straight-line code, their live
    // ranges begin in the same order, so greedy colouring in this order is optimal.
    for (const SlotAccess& a : accesses)
      if (numberOf_[a.vector] == kNoSlot) numberOf_[a.vector] = vectors_++;
    starts_.resize(function.blocks.size() + 1);
    for (const SlotAccess& a : accesses) ++starts_[a.block + 1];
    for (std::size_t b = 0; b < function.blocks.size(); ++b) starts_[b + 1] += starts_[b];
  }

  std::vector<std::uint32_t> run(std::uint32_t& slots) {
    findLiveOut();
    findInterference();
    const std::vector<std::uint32_t> slotOf = colour(slots);
    std::vector<std::uint32_t> result;
    result.reserve(accesses_.size());
    for (const SlotAccess& a : accesses_) result.push_back(slotOf[numberOf_[a.vector]]);
    return result;
  }

 private:
  std::uint32_t number(std::size_t access) const { return numberOf_[accesses_[access].vector]; }

  // Live-variable analysis of spilled vectors. A vector is live at the end of a block if some
  // path from there reloads it.
  void findLiveOut() {
    const std::size_t blocks = function_.blocks.size();
    // Indexed by block: the vectors that the block reloads before it stores them.
    std::vector<Bits> read(blocks, Bits(vectors_));
    std::vector<Bits> stored(blocks, Bits(vectors_));
    for (std::size_t b = 0; b < blocks; ++b)
      for (std::size_t i = starts_[b]; i < starts_[b + 1]; ++i) {
        if (accesses_[i].isStore)
          stored[b].set(number(i));
        else if (!stored[b].has(number(i)))
          read[b].set(number(i));
      }
    std::vector<Bits> in(blocks, Bits(vectors_));
    liveOut_.assign(blocks, Bits(vectors_));
    for (bool changed = true; changed;) {
      changed = false;
      for (std::size_t b = blocks; b-- > 0;) {
        for (const std::uint32_t s : successors(function_.blocks[b]))
          changed = liveOut_[b].add(in[s]) || changed;
        changed = in[b].flow(read[b], liveOut_[b], stored[b]) || changed;
      }
    }
  }

  // The vector that is stored interferes with all vectors that are live after the store.
  void findInterference() {
    interferes_.assign(vectors_, Bits(vectors_));
    for (std::size_t b = 0; b < function_.blocks.size(); ++b) {
      Bits live = liveOut_[b];
      for (std::size_t i = starts_[b + 1]; i-- > starts_[b];) {
        const std::uint32_t v = number(i);
        if (accesses_[i].isStore) {
          live.clear(v);
          interferes_[v].add(live);
        } else {
          live.set(v);
        }
      }
    }
  }

  std::vector<std::uint32_t> colour(std::uint32_t& slots) const {
    std::vector<std::uint32_t> slotOf(vectors_, kNoSlot);
    std::vector<std::uint32_t> takenBy;  // indexed by slot: last vector that cannot use the slot
    slots = 0;
    for (std::uint32_t v = 0; v < vectors_; ++v) {
      for (std::uint32_t u = 0; u < v; ++u)
        if (interferes_[v].has(u) || interferes_[u].has(v)) takenBy[slotOf[u]] = v;
      const auto free = std::find_if(takenBy.begin(), takenBy.end(),
                                     [v](std::uint32_t by) { return by != v; });
      slotOf[v] = static_cast<std::uint32_t>(free - takenBy.begin());
      if (free == takenBy.end()) {
        takenBy.push_back(kNoSlot);
        ++slots;
      }
    }
    return slotOf;
  }

  const Function& function_;
  const std::vector<SlotAccess>& accesses_;
  std::vector<std::uint32_t> numberOf_;  // indexed by register: the number of the spilled vector
  std::uint32_t vectors_ = 0;
  std::vector<std::size_t> starts_;  // indexed by block: the block's first access
  std::vector<Bits> liveOut_;
  std::vector<Bits> interferes_;      // the interference graph is the symmetric closure of this relation
};

}  // namespace

std::vector<std::uint32_t> colourSlots(const Function& function,
                                      const std::vector<SlotAccess>& accesses,
                                      std::uint32_t& slots) {
  return SlotColouring(function, accesses).run(slots);
}

}  // namespace qpu::compiler
