#include "compiler/allocate.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

// Two vectors that the same operation reads. The two vectors should be in different register files.
struct OperandPair {
  std::uint32_t one, other;
  std::uint32_t weight;
};

std::uint32_t weightOf(const Block& block) {
  std::uint32_t weight = 1;
  for (std::uint32_t d = 0; d < std::min(block.loopDepth, 4U); ++d) weight *= 8;
  return weight;
}

}  // namespace

std::vector<Place> findHomes(const Function& function, const Liveness& live, int fileRegisters) {
  const std::size_t n = live.globals.size();
  const std::size_t blocks = function.blocks.size();
  std::vector<OperandPair> pairs;
  std::vector<std::uint32_t> withImmediate(n, 0);
  std::vector<std::array<std::uint64_t, 2>> reads(n, std::array<std::uint64_t, 2>{});
  std::vector<Bits> liveBlocks(n, Bits(blocks));
  for (std::size_t b = 0; b < blocks; ++b) {
    for (std::size_t g = 0; g < n; ++g)
      if (live.in[b].has(g) || live.out[b].has(g)) liveBlocks[g].set(b);
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
      // A rotation within a quad reads its vector from file A.
      if (o.op == Op::Broadcast && x != Liveness::kLocal && o.constant % 16 != 0 &&
          o.constant % 16 < 4)
        withImmediate[x] += weight;
      if (x != Liveness::kLocal && o.b.kind == Operand::Kind::Immediate) withImmediate[x] += weight;
      if (y != Liveness::kLocal && o.a.kind == Operand::Kind::Immediate) withImmediate[y] += weight;
    }
  }
  std::sort(pairs.begin(), pairs.end(),
            [](const OperandPair& p, const OperandPair& q) { return p.one < q.one; });

  std::vector<Place> homes(n, kNowhere);
  std::vector<Bits> taken(kR0, Bits(blocks));
  // The number of reads by each pipe (ADD and MUL) from each register file (A and B). Two
  // operations that each read a register can issue together only if the two pipes read from
  // different register files.
  std::array<std::array<std::uint64_t, 2>, 2> load{};
  // The vectors that are read most often are assigned first. The other vectors are distributed
  // evenly between the two files.
  std::vector<std::uint32_t> order(n);
  for (std::uint32_t g = 0; g < n; ++g) order[g] = g;
  const auto readsOf = [&](std::uint32_t g) { return reads[g][0] + reads[g][1] + withImmediate[g]; };
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t x, std::uint32_t y) {
    return readsOf(x) > readsOf(y);
  });
  for (const std::uint32_t g : order) {
    // The costs of file A and of file B for this vector.
    std::array<std::uint64_t, 2> conflicts{0, withImmediate[g]};
    for (auto pair = std::lower_bound(
             pairs.begin(), pairs.end(), g,
             [](const OperandPair& p, std::uint32_t x) { return p.one < x; });
         pair != pairs.end() && pair->one == g; ++pair) {
      const Place other = homes[pair->other];
      if (other != kNowhere) conflicts[isFileB(other) ? 1 : 0] += pair->weight;
    }
    // Count the registers of each file that are occupied in the innermost loops in which vector g
    // is live.
    Bits innermost(blocks);
    std::uint32_t depth = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
      if (!liveBlocks[g].has(b) || function.blocks[b].loopDepth < depth) continue;
      if (function.blocks[b].loopDepth > depth) innermost = Bits(blocks);
      depth = function.blocks[b].loopDepth;
      innermost.set(b);
    }
    std::array<std::uint32_t, 2> count{};
    for (Place p = 0; p < kR0; ++p) count[isFileA(p) ? 0 : 1] += taken[p].intersects(innermost) ? 1U : 0U;
    std::array<std::uint64_t, 2> portLoad{};
    for (std::size_t file = 0; file < 2; ++file)
      for (std::size_t pipe = 0; pipe < 2; ++pipe)
        if (reads[g][pipe] != 0) portLoad[file] += load[pipe][file] + load[1 - pipe][file];
    // A vector with few reads is assigned to the file with more free registers. For any other
    // vector, the choice depends first on the operands that are read together with the vector, and
    // then on the number of reads by each pipe from each file.
    const auto difference = [](std::uint64_t x, std::uint64_t y) { return x > y ? x - y : y - x; };
    std::array<std::uint64_t, 2> worse{count[0], count[1]};
    const bool isCold = readsOf(g) * 8 < readsOf(order[0]);
    if (!isCold || difference(count[0], count[1]) <= 2) {
      if (conflicts[0] != conflicts[1])
        worse = conflicts;
      else if (portLoad[0] != portLoad[1] && difference(portLoad[0], portLoad[1]) <= 2 * readsOf(g))
        worse = portLoad;
    }
    const std::size_t first = worse[0] > worse[1] ? 1 : 0;
    for (std::size_t k = 0; k < 2 && homes[g] == kNowhere; ++k) {
      const std::size_t file = first ^ k;
      for (int r = 0; r < fileRegisters && homes[g] == kNowhere; ++r) {
        const auto place = static_cast<Place>(file * kFileB + static_cast<std::size_t>(r));
        if (taken[place].intersects(liveBlocks[g])) continue;
        taken[place].add(liveBlocks[g]);
        homes[g] = place;
        for (std::size_t pipe = 0; pipe < 2; ++pipe) load[pipe][file] += reads[g][pipe];
      }
    }
    if (homes[g] == kNowhere) return {};
  }
  return homes;
}

}  // namespace qpu::compiler
