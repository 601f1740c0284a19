#include "compiler/spill_slots.hpp"

#include <algorithm>
#include <cstddef>

#include "compiler/liveness.hpp"

namespace qpu::compiler {
namespace {

constexpr std::uint32_t kNoSlot = UINT32_MAX;

class Sharing {
 public:
  Sharing(const Function& function, const std::vector<SlotAccess>& accesses)
      : function_(function), accesses_(accesses), numberOf_(function.registers, kNoSlot) {
    // Vectors are numbered as they come; those of straight code so by where they
    // begin, in which order the first slot that is free is never a bad choice.
    for (const SlotAccess& a : accesses)
      if (numberOf_[a.vector] == kNoSlot) numberOf_[a.vector] = vectors_++;
    starts_.resize(function.blocks.size() + 1);
    for (const SlotAccess& a : accesses) ++starts_[a.block + 1];
    for (std::size_t b = 0; b < function.blocks.size(); ++b) starts_[b + 1] += starts_[b];
  }

  std::vector<std::uint32_t> run(std::uint32_t& slots) {
    findWanted();
    findConflicts();
    const std::vector<std::uint32_t> slotOf = choose(slots);
    std::vector<std::uint32_t> result;
    result.reserve(accesses_.size());
    for (const SlotAccess& a : accesses_) result.push_back(slotOf[numberOf_[a.vector]]);
    return result;
  }

 private:
  std::uint32_t number(std::size_t access) const { return numberOf_[accesses_[access].vector]; }

  // Whose memory some way from the end of each block on reads.
  void findWanted() {
    const std::size_t blocks = function_.blocks.size();
    std::vector<Bits> read(blocks, Bits(vectors_));     // before the block stores them
    std::vector<Bits> stored(blocks, Bits(vectors_));
    for (std::size_t b = 0; b < blocks; ++b)
      for (std::size_t i = starts_[b]; i < starts_[b + 1]; ++i) {
        if (accesses_[i].isStore)
          stored[b].set(number(i));
        else if (!stored[b].has(number(i)))
          read[b].set(number(i));
      }
    std::vector<Bits> in(blocks, Bits(vectors_));
    wanted_.assign(blocks, Bits(vectors_));
    for (bool changed = true; changed;) {
      changed = false;
      for (std::size_t b = blocks; b-- > 0;) {
        for (const std::uint32_t s : successors(function_.blocks[b]))
          changed = wanted_[b].add(in[s]) || changed;
        changed = in[b].flow(read[b], wanted_[b], stored[b]) || changed;
      }
    }
  }

  // A store must not hit what is wanted then.
  void findConflicts() {
    conflicts_.assign(vectors_, Bits(vectors_));
    for (std::size_t b = 0; b < function_.blocks.size(); ++b) {
      Bits wanted = wanted_[b];
      for (std::size_t i = starts_[b + 1]; i-- > starts_[b];) {
        const std::uint32_t v = number(i);
        if (accesses_[i].isStore) {
          wanted.clear(v);
          conflicts_[v].add(wanted);
        } else {
          wanted.set(v);
        }
      }
    }
  }

  std::vector<std::uint32_t> choose(std::uint32_t& slots) const {
    std::vector<std::uint32_t> slotOf(vectors_, kNoSlot);
    std::vector<std::uint32_t> takenFor;  // the last vector that must not have the slot
    slots = 0;
    for (std::uint32_t v = 0; v < vectors_; ++v) {
      for (std::uint32_t u = 0; u < v; ++u)
        if (conflicts_[v].has(u) || conflicts_[u].has(v)) takenFor[slotOf[u]] = v;
      const auto free = std::find_if(takenFor.begin(), takenFor.end(),
                                     [v](std::uint32_t by) { return by != v; });
      slotOf[v] = static_cast<std::uint32_t>(free - takenFor.begin());
      if (free == takenFor.end()) {
        takenFor.push_back(kNoSlot);
        ++slots;
      }
    }
    return slotOf;
  }

  const Function& function_;
  const std::vector<SlotAccess>& accesses_;
  std::vector<std::uint32_t> numberOf_;  // of each register, as a vector with memory
  std::uint32_t vectors_ = 0;
  std::vector<std::size_t> starts_;  // of each block's accesses
  std::vector<Bits> wanted_;
  std::vector<Bits> conflicts_;      // to be taken both ways
};

}  // namespace

std::vector<std::uint32_t> colourSlots(const Function& function,
                                      const std::vector<SlotAccess>& accesses,
                                      std::uint32_t& slots) {
  return Sharing(function, accesses).run(slots);
}

}  // namespace qpu::compiler
