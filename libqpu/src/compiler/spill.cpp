#include "compiler/spill.hpp"

#include <algorithm>

#include "compiler/liveness.hpp"
#include "compiler/rematerialise.hpp"
#include "compiler/spill_slots.hpp"
#include "compiler/vpm_layout.hpp"
#include "error_facts.hpp"

namespace qpu::compiler {
namespace {

constexpr std::uint32_t kSlotBytes = 64;
// Operations read up to three vectors and the spills need a few words of setup.
constexpr std::uint32_t kLeastLocals = 4;
constexpr std::uint32_t kWantedLocals = 8;

std::uint32_t weightOf(const Block& block) {
  std::uint32_t weight = 1;
  for (std::uint32_t d = 0; d < std::min(block.loopDepth, 5U); ++d) weight *= 10;
  return weight;
}

bool isReadSide(Op op) {
  return op == Op::VpmReadSetup || op == Op::VpmRead || op == Op::DmaLoadStart ||
         op == Op::DmaLoadWait;
}
bool isWriteSide(Op op) {
  return op == Op::VpmWriteSetup || op == Op::VpmWrite || op == Op::DmaStoreStart;
}

// Vectors alive at once in a block, those that leave it counted throughout.
std::uint32_t pressureOf(const Function& f, const Liveness& live, std::size_t b,
                         std::vector<char>& alive) {
  alive.assign(f.registers, 0);
  std::uint32_t count = 0;
  for (std::size_t g = 0; g < live.globals.size(); ++g)
    if (live.out[b].has(g)) {
      alive[live.globals[g]] = 1;
      ++count;
    }
  std::uint32_t most = count;
  const auto& operations = f.blocks[b].operations;
  for (std::size_t i = operations.size(); i-- > 0;) {
    const Operation& o = operations[i];
    if (o.target != Operation::kNone && !isUpdate(o) && !live.liveOut(b, o.target) &&
        alive[o.target] != 0) {
      alive[o.target] = 0;
      --count;
    }
    forEachRead(o, [&](Vreg v) {
      if (alive[v] == 0) {
        alive[v] = 1;
        ++count;
      }
    });
    most = std::max(most, count);
  }
  return most;
}

class Spiller {
 public:
  Spiller(Function& function, std::uint32_t limit, bool memory)
      : f_(function), limit_(limit), memory_(memory), live_(findLiveness(function)),
        rematerialisations_(findRematerialisable(function, live_)) {}

  bool run(std::uint32_t& bytes) {
    inMemory_.assign(f_.registers, 0);
    if (!chooseGlobals()) return false;
    if (memory_) addPrologue();
    for (std::size_t b = 0; b < f_.blocks.size(); ++b)
      if (!rewrite(b)) return false;
    bytes = placeSlots() * kSlotBytes;
    return true;
  }

 private:
  static constexpr std::uint32_t kNever = UINT32_MAX;

  // Globals that stay in memory from block to block.
  bool chooseGlobals() {
    const std::size_t n = live_.globals.size();
    const std::size_t blocks = f_.blocks.size();
    std::vector<std::uint64_t> cost(n, 0);
    std::vector<Bits> referenced(blocks, Bits(n));
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::uint64_t weight = weightOf(f_.blocks[b]);
      const auto count = [&](Vreg v) {
        const std::uint32_t g = live_.indexOf[v];
        if (g == Liveness::kLocal) return;
        cost[g] += canRematerialise(v) ? weight * rematerialisations_[v].steps : weight * 10;
        referenced[b].set(g);
      };
      for (const Operation& o : f_.blocks[b].operations) {
        forEachRead(o, count);
        if (o.target != Operation::kNone && !isUpdate(o)) count(o.target);
      }
    }
    std::vector<std::uint32_t> byCost(n);
    for (std::uint32_t g = 0; g < n; ++g) byCost[g] = g;
    std::stable_sort(byCost.begin(), byCost.end(),
                     [&](std::uint32_t x, std::uint32_t y) { return cost[x] < cost[y]; });
    std::vector<std::size_t> order(blocks);
    for (std::size_t b = 0; b < blocks; ++b) order[b] = b;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) {
      return f_.blocks[x].loopDepth > f_.blocks[y].loopDepth;
    });
    std::vector<char> alive;
    // The spills' own two vectors are alive everywhere.
    const std::uint32_t room = limit_ - (memory_ ? 2 : 0);
    for (const std::size_t b : order) {
      std::uint32_t most = pressureOf(f_, live_, b, alive);
      std::uint32_t resident = 0;
      for (std::size_t g = 0; g < n; ++g) {
        if (!live_.in[b].has(g) && !live_.out[b].has(g)) continue;
        if (isSpilled(g)) {
          if (!referenced[b].has(g) && most > 0) --most;
        } else {
          ++resident;
        }
      }
      const auto drop = [&](std::uint32_t g) {
        inMemory_[live_.globals[g]] = 1;
        --resident;
        if (!referenced[b].has(g) && most > 0) --most;
      };
      // What only passes through costs nothing here.
      for (const std::uint32_t g : byCost) {
        if (most <= room) break;
        const bool passes = (live_.in[b].has(g) || live_.out[b].has(g)) && !referenced[b].has(g);
        if (passes && maySpill(g) && cost[g] <= std::uint64_t{weightOf(f_.blocks[b])} * 40) drop(g);
      }
      // A vector that stays has its register for the whole block, so those that enter it and those that leave it may be
      // too many together where the pressure is not.
      if (most <= room && resident + kLeastLocals <= room) continue;
      const std::uint32_t least = most > room && room >= kWantedLocals + 4 ? kWantedLocals : kLeastLocals;
      for (const std::uint32_t g : byCost) {
        if (resident + least <= room) break;
        if ((live_.in[b].has(g) || live_.out[b].has(g)) && maySpill(g)) drop(g);
      }
      if (resident + kLeastLocals > room) return false;
    }
    return true;
  }
  bool maySpill(std::size_t g) const {
    return !isSpilled(g) && (memory_ || canRematerialise(live_.globals[g]));
  }
  bool canRematerialise(Vreg v) const { return rematerialisations_[v].steps != 0; }
  bool isSpilled(std::size_t g) const { return inMemory_[live_.globals[g]] != 0; }

  // Reads the address of the area first of all uniforms, and finds the row as
  // soon as the QPU's number is there.
  void addPrologue() {
    base_ = f_.registers++;
    row_ = f_.registers++;
    f_.uniforms.insert(f_.uniforms.begin(), {code::Uniform::Kind::SpillBase, 0});
    auto& entry = f_.blocks[0].operations;
    Operation read;
    read.op = Op::Uniform;
    read.target = base_;
    entry.insert(entry.begin(), read);
    std::size_t at = 1;
    if (f_.qpuNumber != Operation::kNone) {
      for (std::size_t i = 0; i < entry.size(); ++i)
        if (entry[i].target == f_.qpuNumber) {
          at = i + 1;
          break;
        }
    }
    std::vector<Operation> code;
    if (f_.qpuNumber == Operation::kNone || f_.spillRowStride == 0) {
      loadWord(code, row_, f_.spillRow);
    } else {
      const Vreg stride = f_.registers++;
      const Vreg rows = f_.registers++;
      const Vreg first = f_.registers++;
      loadWord(code, stride, f_.spillRowStride);
      Operation multiply;
      multiply.op = Op::Mul;
      multiply.mul = isa::MulOp::Mul24;
      multiply.target = rows;
      multiply.a = Operand::reg(f_.qpuNumber);
      multiply.b = Operand::reg(stride);
      code.push_back(multiply);
      loadWord(code, first, f_.spillRow);
      code.push_back(addition(row_, Operand::reg(rows), Operand::reg(first)));
    }
    entry.insert(entry.begin() + static_cast<std::ptrdiff_t>(at), code.begin(), code.end());
    ready_ = at + code.size();
    inMemory_.resize(f_.registers, 0);
    rematerialisations_.resize(f_.registers);
    live_.indexOf.resize(f_.registers, Liveness::kLocal);
  }

  static void loadWord(std::vector<Operation>& code, Vreg target, std::uint32_t word) {
    Operation o;
    o.op = Op::Load;
    o.target = target;
    o.constant = word;
    code.push_back(o);
  }
  static Operation addition(Vreg target, Operand a, Operand b) {
    Operation o;
    o.op = Op::Add;
    o.add = isa::AddOp::Add;
    o.target = target;
    o.a = a;
    o.b = b;
    return o;
  }

  // Spill code

  Vreg word(std::vector<Operation>& code, std::uint32_t bits) {
    const Vreg v = f_.registers++;
    loadWord(code, v, bits);
    return v;
  }
  // `bits` plus the row shifted up.
  Vreg rowWord(std::vector<Operation>& code, std::uint32_t bits, std::uint32_t shift) {
    Vreg row = row_;
    if (shift != 0) {
      row = f_.registers++;
      Operation o = addition(row, Operand::reg(row_), Operand::imm(shift));
      o.add = isa::AddOp::Shl;
      code.push_back(o);
    }
    const Vreg constant = word(code, bits);
    const Vreg v = f_.registers++;
    code.push_back(addition(v, Operand::reg(constant), Operand::reg(row)));
    return v;
  }
  // The offset is filled in when all slots are known.
  Vreg slotAddress(std::vector<Operation>& code, Vreg v, bool isStore) {
    accesses_.push_back({v, static_cast<std::uint32_t>(block_),
                         static_cast<std::uint32_t>(code.size()), isStore});
    const Vreg offset = word(code, 0);
    const Vreg address = f_.registers++;
    code.push_back(addition(address, Operand::reg(base_), Operand::reg(offset)));
    return address;
  }
  // Their number.
  std::uint32_t placeSlots() {
    std::uint32_t slots = 0;
    const std::vector<std::uint32_t> slotOf = colourSlots(f_, accesses_, slots);
    for (std::size_t i = 0; i < accesses_.size(); ++i)
      f_.blocks[accesses_[i].block].operations[accesses_[i].position].constant =
          slotOf[i] * kSlotBytes;
    return slots;
  }
  static Operation effect(Op op, Vreg a) {
    Operation o;
    o.op = op;
    if (a != Operation::kNone) o.a = Operand::reg(a);
    o.unit = kSpillUnit;
    return o;
  }

  void store(std::vector<Operation>& code, Vreg v) {
    code.push_back(effect(Op::DmaStoreWait, Operation::kNone));
    code.push_back(effect(Op::VpmWriteSetup, rowWord(code, vpm::writeRows(0, 1), 0)));
    code.push_back(effect(Op::VpmWrite, v));
    code.push_back(effect(Op::VpmWriteSetup, rowWord(code, vpm::storeRow(0), vpm::kStoreRowShift)));
    code.push_back(effect(Op::DmaStoreStart, slotAddress(code, v, true)));
    code.push_back(effect(Op::DmaStoreWait, Operation::kNone));
  }

  void reload(std::vector<Operation>& code, Vreg v) {
    code.push_back(effect(Op::VpmReadSetup, rowWord(code, vpm::loadRow(0), vpm::kLoadRowShift)));
    code.push_back(effect(Op::DmaLoadStart, slotAddress(code, v, false)));
    code.push_back(effect(Op::DmaLoadWait, Operation::kNone));
    code.push_back(effect(Op::VpmReadSetup, rowWord(code, vpm::readRow(0), 0)));
    Operation read;
    read.op = Op::VpmRead;
    read.target = v;
    read.unit = kSpillUnit;
    code.push_back(read);
  }

  // One block

  struct State {
    bool resident = false;
    bool stored = false;   // memory has it
    bool written = false;  // in this block, so far
    std::size_t use = 0;   // next in uses_
  };

  bool isPinned(std::size_t b, Vreg v) const {
    if (v == base_ || v == row_) return true;
    return inMemory_[v] == 0 && (live_.liveIn(b, v) || live_.liveOut(b, v));
  }

  // Where the operations of a block read each vector.
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
    std::uint32_t pinned = memory_ ? 2 : 0;
    for (std::size_t g = 0; g < live_.globals.size(); ++g)
      if (!isSpilled(g) && (live_.in[b].has(g) || live_.out[b].has(g))) ++pinned;
    if (pinned + 3 > limit_) return false;
    room_ = limit_ - pinned;
    for (std::size_t g = 0; g < live_.globals.size(); ++g)
      if (isSpilled(g) && live_.in[b].has(g))
        state_[live_.globals[g]].stored = !canRematerialise(live_.globals[g]);
    findUnits(operations);
    for (std::uint32_t i = 0; i < operations.size(); ++i)
      if (!step(i, operations[i], operations)) return false;
    // What the next blocks expect in memory.
    for (std::size_t g = 0; g < live_.globals.size(); ++g) {
      const Vreg v = live_.globals[g];
      if (isSpilled(g) && live_.out[b].has(g) && !state_[v].stored && !canRematerialise(v)) {
        if (!state_[v].resident) failWithoutContent(v);
        store(out_, v);
      }
    }
    f_.blocks[b].operations = out_;
    return true;
  }

  // Before which operations a spill may not be stored, a vector not reloaded:
  // between a setup and what uses it.
  void findUnits(const std::vector<Operation>& operations) {
    const std::size_t n = operations.size();
    noStore_.assign(n + 1, 0);
    noReload_.assign(n + 1, 0);
    if (!memory_) return;
    std::size_t lastWrite = 0;
    for (std::size_t i = 0; i < n; ++i)
      if (isWriteSide(operations[i].op)) lastWrite = i;
    bool open = false;
    for (std::size_t i = 0; i < n; ++i) {
      noStore_[i] = open ? 1 : 0;
      if (operations[i].op == Op::VpmWriteSetup) open = true;
      if (operations[i].op == Op::DmaStoreStart || i == lastWrite) open = false;
    }
    std::size_t next = n;  // the next operation of the read side
    for (std::size_t i = n; i-- > 0;) {
      if (next < n) {
        // Between operations i and next: who was last before?
        std::size_t last = i;
        if (isReadSide(operations[last].op)) {
          const Op op = operations[last].op;
          const bool isOpen = op == Op::VpmReadSetup || op == Op::DmaLoadStart ||
                              (op == Op::VpmRead && operations[next].op == Op::VpmRead);
          if (isOpen)
            for (std::size_t k = last + 1; k <= next; ++k) noReload_[k] = 1;
        }
      }
      if (isReadSide(operations[i].op)) next = i;
    }
    if (ready_ != 0 && block_ == 0)
      for (std::size_t i = 0; i < std::min(ready_, n); ++i) noStore_[i] = noReload_[i] = 1;
  }

  bool step(std::uint32_t i, const Operation& o, const std::vector<Operation>& operations) {
    if (noStore_[i] == 0 && i + 1 < noStore_.size() && noStore_[i + 1] != 0)
      storeAhead(i, operations);
    if (noReload_[i] == 0) {
      runEnd_ = i;
      if (i + 1 < noReload_.size() && noReload_[i + 1] != 0 && !reloadAhead(i, operations)) return false;
    }
    // The vectors that are read, those of this operation not evicted for each other.
    std::array<Vreg, 3> reads{};
    unsigned count = 0;
    forEachRead(o, [&](Vreg v) { reads[count++] = v; });
    busy_.assign(reads.begin(), reads.begin() + count);
    for (unsigned k = 0; k < count; ++k)
      if (!bringIn(reads[k], i)) return false;
    for (unsigned k = 0; k < count; ++k) {
      const Vreg v = reads[k];
      if (isPinned(block_, v) || !state_[v].resident) continue;
      const bool dies = nextUse(block_, v, i + 1) == kNever;
      if (dies) leave(v);
    }
    if (o.target != Operation::kNone) {
      const Vreg v = o.target;
      if (!isPinned(block_, v)) {
        if (!state_[v].resident) {
          if (!makeRoom(i)) return false;
          enter(v);
        }
        state_[v].stored = false;
      }
      state_[v].written = true;
      out_.push_back(o);
      if (!isPinned(block_, v) && nextUse(block_, v, i + 1) == kNever) leave(v);
      return true;
    }
    out_.push_back(o);
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

  bool bringIn(Vreg v, std::uint32_t i) {
    if (isPinned(block_, v)) {
      // A vector that leaves the block has its register before the block has written it, too.
      if (v == base_ || v == row_ || live_.liveIn(block_, v) || state_[v].written) return true;
      if (!canRematerialise(v)) failWithoutContent(v);
      return repeat(v, i);
    }
    if (state_[v].resident) return true;
    if (canRematerialise(v)) return repeat(v, i);
    if (!state_[v].stored) failWithoutContent(v);
    if (noReload_[i] != 0 || !makeRoom(i)) return false;
    reload(out_, v);
    enter(v);
    return true;
  }

  // Computes v again.
  bool repeat(Vreg v, std::uint32_t i) {
    const Operation o = rematerialisations_[v].operation;
    const std::size_t before = busy_.size();
    bool can = true;
    forEachRead(o, [&](Vreg u) {
      can = can && bringIn(u, i);
      busy_.push_back(u);
    });
    if (!can) return false;
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

  // A register for one more vector before operation i.
  bool makeRoom(std::uint32_t i) {
    while (residents_.size() >= room_) {
      Vreg victim = Operation::kNone;
      std::uint64_t best = 0;
      for (const Vreg v : residents_) {
        if (std::find(busy_.begin(), busy_.end(), v) != busy_.end()) continue;
        if (runEnd_ > i && needsMemory(v) && nextUse(block_, v, i) < runEnd_) continue;
        const bool free = state_[v].stored || canRematerialise(v);
        if (!free && (noStore_[i] != 0 || !memory_)) continue;
        // The farthest next use; a store weighs as much as some distance.
        std::uint64_t score = std::min<std::uint64_t>(nextUse(block_, v, i), 1U << 24U) * 2;
        if (free) score += score / 2 + 1;
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
      store(out_, v);
      state_[v].stored = true;
    }
    leave(v);
  }

  // Within a run of VPM writes nothing can be stored, so what may have to go is
  // stored before it.
  void storeAhead(std::uint32_t i, const std::vector<Operation>& operations) {
    if (!memory_) return;
    std::uint32_t end = i + 1;
    std::uint32_t fresh = 0;
    for (; end < operations.size() && noStore_[end] != 0; ++end)
      if (operations[end].target != Operation::kNone) ++fresh;
    fresh += 3;
    if (operations[i].target != Operation::kNone) ++fresh;
    // Reloads within the run need places too.
    for (std::uint32_t k = i; k < end; ++k)
      forEachRead(operations[k], [&](Vreg v) {
        if (!isPinned(block_, v) && !state_[v].resident) ++fresh;
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
    while (open < fresh && !candidates.empty()) {
      const Vreg v = candidates.back().second;
      candidates.pop_back();
      store(out_, v);
      state_[v].stored = true;
      ++open;
    }
  }

  // Within a run of VPM reads nothing can be reloaded: what it reads from memory, or computes again from there, is in
  // registers before it and stays there until it is read.
  bool reloadAhead(std::uint32_t i, const std::vector<Operation>& operations) {
    busy_.clear();
    std::vector<Vreg> made;
    for (runEnd_ = i; runEnd_ < operations.size() && (runEnd_ == i || noReload_[runEnd_] != 0); ++runEnd_) {
      const Operation& o = operations[runEnd_];
      forEachRead(o, [&](Vreg v) {
        if (!isPinned(block_, v) && needsMemory(v) && std::find(made.begin(), made.end(), v) == made.end())
          busy_.push_back(v);
      });
      if (o.target != Operation::kNone) made.push_back(o.target);
    }
    const std::vector<Vreg> wanted = busy_;
    return std::all_of(wanted.begin(), wanted.end(), [&](Vreg v) { return bringIn(v, i); });
  }
  // Whether it takes a reload to have the vector in a register, once it is in none.
  bool needsMemory(Vreg v) const {
    if (!canRematerialise(v)) return true;
    return std::any_of(rematerialisations_[v].leaves.begin(), rematerialisations_[v].leaves.end(), [this](Vreg u) { return inMemory_[u] != 0; });
  }

  Function& f_;
  std::uint32_t limit_;
  bool memory_;
  Liveness live_;
  std::vector<Rematerialisation> rematerialisations_;             // of each register
  std::vector<char> inMemory_;              // between blocks
  std::vector<SlotAccess> accesses_;
  Vreg base_ = Operation::kNone, row_ = Operation::kNone;
  std::size_t ready_ = 0;                   // operations of the entry block before spills can be
  std::size_t block_ = 0;
  std::uint32_t room_ = 0;                  // registers for vectors that are not pinned
  std::vector<Operation> out_;
  std::vector<std::vector<std::uint32_t>> uses_;
  std::vector<Vreg> touched_, residents_;
  std::vector<Vreg> busy_;                  // not to be evicted for each other
  std::uint32_t runEnd_ = 0;                // of the run of VPM reads, if there is one
  std::vector<State> state_;
  std::vector<char> noStore_, noReload_;
};

}  // namespace

std::uint32_t pressure(const Function& function) {
  const Liveness live = findLiveness(function);
  std::vector<char> alive;
  std::uint32_t most = 0;
  for (std::size_t b = 0; b < function.blocks.size(); ++b)
    most = std::max(most, pressureOf(function, live, b, alive));
  return most;
}

bool spill(Function& function, std::uint32_t limit, bool memory, std::uint32_t& bytes) {
  return Spiller(function, limit, memory).run(bytes);
}

}  // namespace qpu::compiler
