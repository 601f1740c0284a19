#include "compiler/rematerialise.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

// Gives the same vector whenever its operands are the same.
bool isRepeatable(const Operation& o) {
  if (o.setsFlags || o.cond != isa::Cond::Always || o.target == Operation::kNone) return false;
  switch (o.op) {
    case Op::Load: case Op::LoadPerElement: case Op::ElementNumber: case Op::Move: case Op::Add:
    case Op::Mul: case Op::Broadcast: return true;
    case Op::Rotate: return !o.b.isRegister();
    default: return false;
  }
}
constexpr std::uint32_t kMostSteps = 6;  // operations that computing a vector again may take

struct Written {
  std::uint32_t times = 0;
  std::size_t block = 0;
  std::size_t last = 0;  // position
  bool elsewhere = false;
};

std::vector<Written> findWritten(const Function& f) {
  std::vector<Written> written(f.registers);
  for (std::size_t b = 0; b < f.blocks.size(); ++b)
    for (std::size_t i = 0; i < f.blocks[b].operations.size(); ++i) {
      const Operation& o = f.blocks[b].operations[i];
      if (o.target == Operation::kNone) continue;
      Written& w = written[o.target];
      w.elsewhere |= w.times != 0 && w.block != b;
      ++w.times;
      w.block = b;
      w.last = i;
    }
  return written;
}

// `u` is not written between the operation i of block b, which makes `v` of it, and any use of `v`, and it is in its
// register or in memory there.
bool outlives(const Liveness& live, const Written& written, Vreg u, Vreg v, std::size_t b, std::size_t i) {
  if (written.elsewhere || (written.block != 0 && written.block != b)) return false;
  if (written.block == b && written.times != 0) {
    // After its last use in the block that writes it, it is kept only for other blocks.
    if (written.last > i || !live.liveOut(b, u)) return false;
  } else if (!live.liveIn(b, u)) {
    return false;
  }
  for (std::size_t k = 0; k < live.in.size(); ++k)
    if (live.liveIn(k, v) && !live.liveIn(k, u)) return false;
  return true;
}

}  // namespace

std::vector<Rematerialisation> findRematerialisable(const Function& function, const Liveness& live) {
  std::vector<Rematerialisation> rematerialisations(function.registers);
  const std::vector<Written> written = findWritten(function);
  for (std::size_t b = 0; b < function.blocks.size(); ++b)
    for (std::size_t i = 0; i < function.blocks[b].operations.size(); ++i) {
      const Operation& o = function.blocks[b].operations[i];
      if (!isRepeatable(o) || written[o.target].times != 1) continue;
      // A vector from the turn before is not that of this turn.
      if (live.liveIn(b, o.target)) continue;
      Rematerialisation candidate;
      candidate.steps = 1;
      candidate.operation = o;
      forEachRead(o, [&](Vreg u) {
        const Rematerialisation& of = rematerialisations[u];
        if (of.steps == 0) {
          candidate.leaves.push_back(u);
          return;
        }
        candidate.steps += of.steps;
        candidate.leaves.insert(candidate.leaves.end(), of.leaves.begin(), of.leaves.end());
      });
      // An operand that is computed again needs its own leaves where this vector is used, which may be later than the
      // operand itself is.
      const bool can = candidate.steps <= kMostSteps &&
                       std::all_of(candidate.leaves.begin(), candidate.leaves.end(), [&](Vreg u) {
                         return outlives(live, written[u], u, o.target, b, i);
                       });
      if (can) rematerialisations[o.target] = std::move(candidate);
    }
  return rematerialisations;
}

}  // namespace qpu::compiler
