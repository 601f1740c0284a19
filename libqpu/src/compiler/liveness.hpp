// Live-variable analysis, which finds the virtual registers that are live at the start and at the
// end of each block. Reference: Alfred V. Aho, Monica S. Lam, Ravi Sethi and Jeffrey D. Ullman,
// "Compilers: Principles, Techniques, and Tools", 2006, section 9.2.
#ifndef QPU_SRC_COMPILER_LIVENESS_HPP
#define QPU_SRC_COMPILER_LIVENESS_HPP

#include <array>
#include <cstdint>
#include <vector>

#include "compiler/mir.hpp"

namespace qpu::compiler {

// A set of small integers.
class Bits {
 public:
  explicit Bits(std::size_t size = 0) : words_((size + 63) / 64) {}
  bool has(std::size_t i) const { return ((words_[i / 64] >> (i % 64)) & 1U) != 0; }
  void set(std::size_t i) { words_[i / 64] |= std::uint64_t{1} << (i % 64); }
  void clear(std::size_t i) { words_[i / 64] &= ~(std::uint64_t{1} << (i % 64)); }
  // Adds the elements of `other`. Returns true if the set has changed.
  bool add(const Bits& other) {
    std::uint64_t fresh = 0;
    for (std::size_t w = 0; w < words_.size(); ++w) {
      fresh |= other.words_[w] & ~words_[w];
      words_[w] |= other.words_[w];
    }
    return fresh != 0;
  }
  // Replaces this set with use + (out - def). Returns true if the set has changed.
  bool flow(const Bits& use, const Bits& out, const Bits& def) {
    std::uint64_t changed = 0;
    for (std::size_t w = 0; w < words_.size(); ++w) {
      const std::uint64_t now = use.words_[w] | (out.words_[w] & ~def.words_[w]);
      changed |= now ^ words_[w];
      words_[w] = now;
    }
    return changed != 0;
  }
  bool intersects(const Bits& other) const {
    for (std::size_t w = 0; w < words_.size(); ++w)
      if ((words_[w] & other.words_[w]) != 0) return true;
    return false;
  }

 private:
  std::vector<std::uint64_t> words_;
};

// Returns true if the operation changes only some of its target's elements. An operation that keeps
// some elements also reads the target's old vector.
inline bool isUpdate(const Operation& o) {
  return o.target != Operation::kNone && o.cond != isa::Cond::Always;
}

template <typename F>
void forEachRead(const Operation& o, F f) {
  if (o.a.isRegister()) f(o.a.value);
  if (o.b.isRegister() && !(o.a.isRegister() && o.a.value == o.b.value)) f(o.b.value);
  if (isUpdate(o) && !(o.a.isRegister() && o.a.value == o.target) &&
      !(o.b.isRegister() && o.b.value == o.target))
    f(o.target);
}

struct Successors {
  std::array<std::uint32_t, 2> block{};
  unsigned count = 0;
  const std::uint32_t* begin() const { return block.data(); }
  const std::uint32_t* end() const { return block.data() + count; }
};
Successors successors(const Block& block);

struct Liveness {
  static constexpr std::uint32_t kLocal = UINT32_MAX;
  std::vector<Vreg> globals;            // the registers that are live across blocks
  std::vector<std::uint32_t> indexOf;   // indexed by register: index in `globals`, or kLocal
  // Indexed by block: the elements of `globals` that are live at the start of the block.
  std::vector<Bits> in;
  std::vector<Bits> out;

  bool liveIn(std::size_t block, Vreg v) const {
    return indexOf[v] != kLocal && in[block].has(indexOf[v]);
  }
  bool liveOut(std::size_t block, Vreg v) const {
    return indexOf[v] != kLocal && out[block].has(indexOf[v]);
  }
};

Liveness findLiveness(const Function& function);

}  // namespace qpu::compiler

#endif
