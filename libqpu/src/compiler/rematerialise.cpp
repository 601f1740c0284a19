#include "compiler/rematerialise.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

constexpr std::uint32_t kMostOperations = 6;  // maximum number of operations to rematerialise one vector

// Returns true if the operation's result depends only on its operands.
bool isRepeatable(const Operation& o) {
  if (o.setsFlags || o.cond != isa::Cond::Always || o.target == Operation::kNone) return false;
  switch (o.op) {
    case Op::Load: case Op::LoadPerElement: case Op::ElementNumber: case Op::Move: case Op::Add:
    case Op::Mul: case Op::Broadcast: return true;
    case Op::Rotate: return !o.b.isRegister();
    default: return false;
  }
}

// The writes to a register.
struct Writes {
  std::uint32_t count = 0;
  std::size_t block = 0;
  std::size_t last = 0;  // position of the last write
  bool inSeveralBlocks = false;
};

std::vector<Writes> findWrites(const Function& f) {
  std::vector<Writes> writes(f.registers);
  for (std::size_t b = 0; b < f.blocks.size(); ++b)
    for (std::size_t i = 0; i < f.blocks[b].operations.size(); ++i) {
      const Operation& o = f.blocks[b].operations[i];
      if (o.target == Operation::kNone) continue;
      Writes& w = writes[o.target];
      w.inSeveralBlocks |= w.count != 0 && w.block != b;
      ++w.count;
      w.block = b;
      w.last = i;
    }
  return writes;
}

// Operation i in block b computes v from u. Returns true if u keeps its content, in a register or
// in memory, from this operation to all uses of v.
bool outlives(const Liveness& live, const Writes& writes, Vreg u, Vreg v, std::size_t b, std::size_t i) {
  if (writes.inSeveralBlocks || (writes.block != 0 && writes.block != b)) return false;
  if (writes.block == b && writes.count != 0) {
    // In the block that writes u, u is available after its last use only if it is live at the end
    // of the block.
    if (writes.last > i || !live.liveOut(b, u)) return false;
  } else if (!live.liveIn(b, u)) {
    return false;
  }
  for (std::size_t k = 0; k < live.in.size(); ++k)
    if (live.liveIn(k, v) && !live.liveIn(k, u)) return false;
  return true;
}

}  // namespace

std::vector<Rematerialisation> findRematerialisable(const Function& function, const Liveness& live) {
  std::vector<Rematerialisation> all(function.registers);
  const std::vector<Writes> writes = findWrites(function);
  for (std::size_t b = 0; b < function.blocks.size(); ++b)
    for (std::size_t i = 0; i < function.blocks[b].operations.size(); ++i) {
      const Operation& o = function.blocks[b].operations[i];
      if (!isRepeatable(o) || writes[o.target].count != 1) continue;
      // If the target is live-in, its vector may come from the previous iteration.
      if (live.liveIn(b, o.target)) continue;
      Rematerialisation r;
      r.operations = 1;
      r.definition = o;
      forEachRead(o, [&](Vreg u) {
        const Rematerialisation& operand = all[u];
        if (operand.operations == 0) {
          r.sources.push_back(u);
          return;
        }
        r.operations += operand.operations;
        r.sources.insert(r.sources.end(), operand.sources.begin(), operand.sources.end());
      });
      // If an operand is also rematerialised, the operand's sources must be available at all uses
      // of this vector, even at those after the operand's last use.
      const bool isPossible =
          r.operations <= kMostOperations &&
          std::all_of(r.sources.begin(), r.sources.end(),
                      [&](Vreg u) { return outlives(live, writes[u], u, o.target, b, i); });
      if (isPossible) all[o.target] = std::move(r);
    }
  return all;
}

}  // namespace qpu::compiler
