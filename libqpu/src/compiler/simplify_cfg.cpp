#include "compiler/simplify_cfg.hpp"

#include <cstddef>
#include <utility>

#include "compiler/liveness.hpp"

namespace qpu::compiler {

void simplifyCfg(Function& function) {
  auto& blocks = function.blocks;
  for (Block& b : blocks)
    if (b.exit == Block::Exit::Branch &&
        (b.cond == isa::BranchCond::Always || b.taken == b.next)) {
      if (b.cond == isa::BranchCond::Always) b.next = b.taken;
      b.exit = Block::Exit::Jump;
    }
  const auto target = [&](std::uint32_t b) {
    for (std::size_t steps = 0; steps < blocks.size(); ++steps) {
      if (!blocks[b].operations.empty() || blocks[b].exit != Block::Exit::Jump) break;
      b = blocks[b].next;
    }
    return b;
  };
  for (Block& b : blocks) {
    if (b.exit != Block::Exit::End) b.next = target(b.next);
    if (b.exit == Block::Exit::Branch) b.taken = target(b.taken);
    if (b.exit == Block::Exit::Branch && b.taken == b.next) b.exit = Block::Exit::Jump;
  }
  std::vector<char> isReachable(blocks.size(), 0);
  std::vector<std::uint32_t> work{0};
  isReachable[0] = 1;
  while (!work.empty()) {
    const std::uint32_t b = work.back();
    work.pop_back();
    for (const std::uint32_t s : successors(blocks[b]))
      if (isReachable[s] == 0) {
        isReachable[s] = 1;
        work.push_back(s);
      }
  }
  std::vector<std::uint32_t> number(blocks.size(), 0);
  std::vector<Block> remaining;
  for (std::size_t b = 0; b < blocks.size(); ++b)
    if (isReachable[b] != 0) {
      number[b] = static_cast<std::uint32_t>(remaining.size());
      remaining.push_back(std::move(blocks[b]));
    }
  for (Block& b : remaining) {
    b.next = number[b.next];
    b.taken = number[b.taken];
  }
  blocks = std::move(remaining);
}

}  // namespace qpu::compiler
