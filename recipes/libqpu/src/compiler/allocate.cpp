#include "compiler/allocate.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

// Two vectors that one operation reads had better be in different files.
struct Together {
  std::uint32_t one, other;
  std::uint32_t weight;
};

std::uint32_t weightOf(const Block& block) {
  std::uint32_t weight = 1;
  for (std::uint32_t d = 0; d < std::min(block.loopDepth, 4U); ++d) weight *= 8;
  return weight;
}

// A vector from one full write of its register to the next, in one block.
struct Web {
  Vreg name = Operation::kNone;  // the register that it is renamed to
  std::uint32_t defined = 0;
  std::uint32_t lastRead = 0;
  std::uint32_t nextWeb = UINT32_MAX;  // of the register that it has the name of
  bool crosses = false;                // lives on after the block, or before it
};

class Names {
 public:
  Names(Function& function, const Liveness& live)
      : function_(function), live_(live), current_(function.registers) {}

  void shareIn(std::size_t b) {
    findWebs(b);
    auto& operations = function_.blocks[b].operations;
    bool any = false;
    for (std::uint32_t i = 0; i < operations.size(); ++i) {
      const std::uint32_t t = written_[i];
      if (t == kNoWeb || webs_[t].defined != i || webs_[t].crosses ||
          operations[i].target == Operation::kNone || isUpdate(operations[i]))
        continue;
      // A vector that ends here and whose register is written anew later.
      for (const std::uint32_t w : {readA_[i], readB_[i]}) {
        if (w == kNoWeb || webs_[w].lastRead != i || webs_[w].nextWeb == kNoWeb) continue;
        if (!live_.liveOut(b, webs_[w].name)) continue;
        const std::uint32_t next = webs_[w].nextWeb;
        if (webs_[t].lastRead > webs_[next].defined || webs_[next].defined <= i) continue;
        if (operations[i].target == webs_[w].name) continue;
        webs_[t].name = webs_[w].name;
        webs_[t].nextWeb = next;
        any = true;
        break;
      }
    }
    if (!any) return;
    for (std::uint32_t i = 0; i < operations.size(); ++i) {
      Operation& o = operations[i];
      if (o.a.isRegister()) o.a.value = webs_[readA_[i]].name;
      if (o.b.isRegister()) o.b.value = webs_[readB_[i]].name;
      if (o.target != Operation::kNone) o.target = webs_[written_[i]].name;
    }
  }

 private:
  static constexpr std::uint32_t kNoWeb = UINT32_MAX;

  std::uint32_t webOf(Vreg v) {
    if (current_[v] == kNoWeb) {
      Web w;
      w.name = v;
      w.crosses = true;
      current_[v] = static_cast<std::uint32_t>(webs_.size());
      webs_.push_back(w);
      touched_.push_back(v);
    }
    return current_[v];
  }

  void findWebs(std::size_t b) {
    const auto& operations = function_.blocks[b].operations;
    if (touched_.empty()) std::fill(current_.begin(), current_.end(), kNoWeb);
    for (const Vreg v : touched_) current_[v] = kNoWeb;
    touched_.clear();
    webs_.clear();
    readA_.assign(operations.size(), kNoWeb);
    readB_.assign(operations.size(), kNoWeb);
    written_.assign(operations.size(), kNoWeb);
    for (std::uint32_t i = 0; i < operations.size(); ++i) {
      const Operation& o = operations[i];
      if (o.a.isRegister()) webs_[readA_[i] = webOf(o.a.value)].lastRead = i;
      if (o.b.isRegister()) webs_[readB_[i] = webOf(o.b.value)].lastRead = i;
      if (o.target == Operation::kNone) continue;
      if (isUpdate(o)) {
        webs_[written_[i] = webOf(o.target)].lastRead = i;
        continue;
      }
      Web w;
      w.name = o.target;
      w.defined = w.lastRead = i;
      const auto fresh = static_cast<std::uint32_t>(webs_.size());
      if (current_[o.target] != kNoWeb)
        webs_[current_[o.target]].nextWeb = fresh;
      else
        touched_.push_back(o.target);
      current_[o.target] = written_[i] = fresh;
      webs_.push_back(w);
    }
    for (const Vreg v : touched_)
      if (live_.liveOut(b, v)) webs_[current_[v]].crosses = true;
  }

  Function& function_;
  const Liveness& live_;
  std::vector<std::uint32_t> current_;  // web of each register
  std::vector<Vreg> touched_;
  std::vector<Web> webs_;
  std::vector<std::uint32_t> readA_, readB_, written_;  // webs, by operation
};

}  // namespace

void shareNames(Function& function, const Liveness& live) {
  Names names(function, live);
  for (std::size_t b = 0; b < function.blocks.size(); ++b) names.shareIn(b);
}

std::vector<Place> findHomes(const Function& function, const Liveness& live, int fileRegisters) {
  const std::size_t n = live.globals.size();
  const std::size_t blocks = function.blocks.size();
  std::vector<Together> pairs;
  std::vector<std::uint32_t> withImmediate(n, 0);
  std::vector<std::array<std::uint64_t, 2>> reads(n, std::array<std::uint64_t, 2>{});
  std::vector<Bits> alive(n, Bits(blocks));
  for (std::size_t b = 0; b < blocks; ++b) {
    for (std::size_t g = 0; g < n; ++g)
      if (live.in[b].has(g) || live.out[b].has(g)) alive[g].set(b);
    const std::uint32_t weight = weightOf(function.blocks[b]);
    const auto index = [&](const Operand& o) {
      return o.isRegister() ? live.indexOf[o.value] : Liveness::kLocal;
    };
    for (const Operation& o : function.blocks[b].operations) {
      const std::uint32_t x = index(o.a);
      const std::uint32_t y = index(o.b);
      if (x != Liveness::kLocal && y != Liveness::kLocal && x != y) {
        pairs.push_back({x, y, weight});
        pairs.push_back({y, x, weight});
      }
      if (o.op == Op::Add || o.op == Op::Mul) {
        if (x != Liveness::kLocal) reads[x][o.op == Op::Add ? 0 : 1] += weight;
        if (y != Liveness::kLocal) reads[y][o.op == Op::Add ? 0 : 1] += weight;
      }
      // Rotations within a quad read file A.
      if (o.op == Op::Broadcast && x != Liveness::kLocal && o.constant % 16 != 0 &&
          o.constant % 16 < 4)
        withImmediate[x] += weight;
      if (x != Liveness::kLocal && o.b.kind == Operand::Kind::Immediate) withImmediate[x] += weight;
      if (y != Liveness::kLocal && o.a.kind == Operand::Kind::Immediate) withImmediate[y] += weight;
    }
  }
  std::sort(pairs.begin(), pairs.end(),
            [](const Together& p, const Together& q) { return p.one < q.one; });

  std::vector<Place> homes(n, kNowhere);
  std::vector<Bits> taken(kR0, Bits(blocks));
  // Reads by the ADD and the MUL pipe from files A and B. What one pipe reads from
  // one file needs partners that the other reads from the other.
  std::array<std::array<std::uint64_t, 2>, 2> load{};
  // The most read first; the rest only fills both files evenly.
  std::vector<std::uint32_t> order(n);
  for (std::uint32_t g = 0; g < n; ++g) order[g] = g;
  const auto readsOf = [&](std::uint32_t g) { return reads[g][0] + reads[g][1] + withImmediate[g]; };
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t x, std::uint32_t y) {
    return readsOf(x) > readsOf(y);
  });
  for (const std::uint32_t g : order) {
    // What speaks against file A and against file B.
    std::array<std::uint64_t, 2> against{0, withImmediate[g]};
    for (auto pair = std::lower_bound(
             pairs.begin(), pairs.end(), g,
             [](const Together& p, std::uint32_t x) { return p.one < x; });
         pair != pairs.end() && pair->one == g; ++pair) {
      const Place other = homes[pair->other];
      if (other != kNowhere) against[isFileB(other) ? 1 : 0] += pair->weight;
    }
    // Registers of the files that are taken where g is alive in the deepest loop.
    Bits deepest(blocks);
    std::uint32_t depth = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
      if (!alive[g].has(b) || function.blocks[b].loopDepth < depth) continue;
      if (function.blocks[b].loopDepth > depth) deepest = Bits(blocks);
      depth = function.blocks[b].loopDepth;
      deepest.set(b);
    }
    std::array<std::uint32_t, 2> count{};
    for (Place p = 0; p < kR0; ++p) count[isFileA(p) ? 0 : 1] += taken[p].meets(deepest) ? 1U : 0U;
    std::array<std::uint64_t, 2> crowd{};
    for (std::size_t file = 0; file < 2; ++file)
      for (std::size_t pipe = 0; pipe < 2; ++pipe)
        if (reads[g][pipe] != 0) crowd[file] += load[pipe][file] + load[1 - pipe][file];
    std::size_t first = 0;
    const bool isCold = readsOf(g) * 8 < readsOf(order[0]);
    if (isCold && std::max(count[0], count[1]) - std::min(count[0], count[1]) > 2)
      first = count[0] > count[1] ? 1 : 0;
    else if (against[0] != against[1])
      first = against[0] > against[1] ? 1 : 0;
    else if (crowd[0] != crowd[1] &&
             std::max(crowd[0], crowd[1]) - std::min(crowd[0], crowd[1]) <= 2 * readsOf(g))
      first = crowd[0] > crowd[1] ? 1 : 0;
    else
      first = count[0] > count[1] ? 1 : 0;
    for (std::size_t k = 0; k < 2 && homes[g] == kNowhere; ++k) {
      const std::size_t file = first ^ k;
      for (int r = 0; r < fileRegisters && homes[g] == kNowhere; ++r) {
        const auto place = static_cast<Place>(file * kFileB + static_cast<std::size_t>(r));
        if (taken[place].meets(alive[g])) continue;
        taken[place].add(alive[g]);
        homes[g] = place;
        for (std::size_t pipe = 0; pipe < 2; ++pipe) load[pipe][file] += reads[g][pipe];
      }
    }
    if (homes[g] == kNowhere) return {};
  }
  return homes;
}

}  // namespace qpu::compiler
