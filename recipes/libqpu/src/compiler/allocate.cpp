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

}  // namespace

std::vector<Place> findHomes(const Function& function, const Liveness& live, int fileRegisters) {
  const std::size_t n = live.globals.size();
  const std::size_t blocks = function.blocks.size();
  std::vector<Together> pairs;
  std::vector<std::uint32_t> withImmediate(n, 0);
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
      if (x != Liveness::kLocal && o.b.kind == Operand::Kind::Immediate) withImmediate[x] += weight;
      if (y != Liveness::kLocal && o.a.kind == Operand::Kind::Immediate) withImmediate[y] += weight;
    }
  }
  std::sort(pairs.begin(), pairs.end(),
            [](const Together& p, const Together& q) { return p.one < q.one; });

  std::vector<Place> homes(n, kNowhere);
  std::vector<Bits> taken(kR0, Bits(blocks));
  std::size_t pair = 0;
  std::array<std::uint32_t, 2> load{};
  for (std::size_t g = 0; g < n; ++g) {
    // What speaks against file A and against file B.
    std::array<std::uint64_t, 2> against{0, std::uint64_t{withImmediate[g]} * 16};
    for (; pair < pairs.size() && pairs[pair].one == g; ++pair) {
      const Place other = homes[pairs[pair].other];
      if (other != kNowhere) against[isFileB(other) ? 1 : 0] += std::uint64_t{pairs[pair].weight} * 16;
    }
    const int first =
        against[0] != against[1] ? (against[0] > against[1] ? 1 : 0) : (load[0] > load[1] ? 1 : 0);
    for (int k = 0; k < 2 && homes[g] == kNowhere; ++k) {
      const int file = first ^ k;
      for (int r = 0; r < fileRegisters && homes[g] == kNowhere; ++r) {
        const auto place = static_cast<Place>(file * kFileB + r);
        if (taken[place].meets(alive[g])) continue;
        taken[place].add(alive[g]);
        homes[g] = place;
        ++load[static_cast<std::size_t>(file)];
      }
    }
    if (homes[g] == kNowhere) return {};
  }
  return homes;
}

}  // namespace qpu::compiler
