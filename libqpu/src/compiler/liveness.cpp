#include "compiler/liveness.hpp"

namespace qpu::compiler {

Successors successors(const Block& block) {
  switch (block.exit) {
    case Block::Exit::Jump: return {{block.next, 0}, 1};
    case Block::Exit::Branch: return {{block.taken, block.next}, 2};
    default: return {};
  }
}

Liveness findLiveness(const Function& function) {
  const std::size_t blocks = function.blocks.size();
  Liveness live;
  live.indexOf.assign(function.registers, Liveness::kLocal);
  // Only a register that some block reads before writing can be live across blocks.
  std::vector<std::uint32_t> writtenIn(function.registers, UINT32_MAX);
  std::vector<std::vector<Vreg>> exposed(blocks);
  for (std::uint32_t b = 0; b < blocks; ++b) {
    for (const Operation& o : function.blocks[b].operations) {
      forEachRead(o, [&](Vreg v) {
        if (writtenIn[v] == b) return;
        if (live.indexOf[v] == Liveness::kLocal) {
          live.indexOf[v] = static_cast<std::uint32_t>(live.globals.size());
          live.globals.push_back(v);
        }
        exposed[b].push_back(v);
      });
      if (o.target != Operation::kNone && !isUpdate(o)) writtenIn[o.target] = b;
    }
  }
  const std::size_t n = live.globals.size();
  std::vector<Bits> use(blocks, Bits(n));
  std::vector<Bits> def(blocks, Bits(n));
  live.in.assign(blocks, Bits(n));
  live.out.assign(blocks, Bits(n));
  for (std::size_t b = 0; b < blocks; ++b) {
    for (const Vreg v : exposed[b]) use[b].set(live.indexOf[v]);
    for (const Operation& o : function.blocks[b].operations)
      if (o.target != Operation::kNone && !isUpdate(o) &&
          live.indexOf[o.target] != Liveness::kLocal)
        def[b].set(live.indexOf[o.target]);
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t b = blocks; b-- > 0;) {
      for (const std::uint32_t s : successors(function.blocks[b])) live.out[b].add(live.in[s]);
      changed |= live.in[b].flow(use[b], live.out[b], def[b]);
    }
  }
  return live;
}

}  // namespace qpu::compiler
