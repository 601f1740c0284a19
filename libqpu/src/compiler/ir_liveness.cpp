#include "compiler/ir_liveness.hpp"

#include <algorithm>

namespace qpu::compiler {

using ir::Graph;
using ir::Instruction;
using ir::kNone;
using ir::Value;

namespace {

bool hasRegister(const Instruction& i) { return ir::hasResult(i) && !ir::isMask(i.kind); }

// For each edge out of the block, calls f with the successor and the block's index among the
// successor's predecessors.
template <typename F>
void forEdges(const Graph& graph, const ir::Block& b, std::uint32_t number, F f) {
  const auto edge = [&](std::uint32_t to) {
    const std::vector<std::uint32_t>& preds = graph.blocks[to].preds;
    for (std::size_t i = 0; i < preds.size(); ++i)
      if (preds[i] == number) f(to, i);
  };
  if (b.exit != ir::Block::Exit::End) edge(b.next);
  if (b.exit == ir::Block::Exit::Branch && b.taken != b.next) edge(b.taken);
}

}  // namespace

IrLiveness::IrLiveness(const Graph& graph) : graph_(graph) {
  findGlobals();
  flow();
  std::vector<char> isLive(graph.values.size(), 0);
  pressure_.resize(graph.blocks.size(), 0);
  for (std::uint32_t b = 0; b < graph.blocks.size(); ++b)
    scan(b, isLive, [&](std::size_t, std::uint32_t count) {
      pressure_[b] = std::max(pressure_[b], count);
      return true;
    });
}

void IrLiveness::findGlobals() {
  bit_.assign(graph_.values.size(), kNone);
  const auto use = [this](std::uint32_t block, Value v) {
    if (graph_.values[v].block == block || bit_[v] != kNone) return;
    bit_[v] = static_cast<std::uint32_t>(globals_.size());
    globals_.push_back(v);
  };
  for (std::uint32_t b = 0; b < graph_.blocks.size(); ++b) {
    const ir::Block& block = graph_.blocks[b];
    for (const Value v : block.body)
      if (!ir::isMask(graph_.values[v].kind))
        forUses(graph_, graph_.values[v], [&](Value o) { use(b, o); });
    if (block.condition != kNone)
      forUsed(graph_, block.condition, [&](Value o) { use(b, o); });
    for (const Value phi : block.phis) {
      // A phi argument is live at the end of the predecessor, even if the predecessor defines the
      // argument.
      for (const Value o : graph_.arguments(phi))
        if (!graph_.isConstant(o)) use(kNone - 1, o);
    }
  }
  words_ = (globals_.size() + 63) / 64;
}

void IrLiveness::flow() {
  const std::size_t blocks = graph_.blocks.size();
  in_.assign(blocks * words_, 0);
  out_.assign(blocks * words_, 0);
  Sets reads(blocks * words_, 0);
  Sets writes(blocks * words_, 0);
  Sets arguments(blocks * words_, 0);
  for (std::uint32_t b = 0; b < blocks; ++b) {
    const ir::Block& block = graph_.blocks[b];
    const std::size_t at = b * words_;
    for (const Value phi : block.phis)
      if (bit_[phi] != kNone) set(writes, at, bit_[phi]);
    const auto read = [&](Value o) {
      if (graph_.values[o].block != b && bit_[o] != kNone) set(reads, at, bit_[o]);
    };
    for (const Value v : block.body) {
      const Instruction& i = graph_.values[v];
      if (ir::isMask(i.kind)) continue;
      forUses(graph_, i, read);
      if (hasRegister(i) && bit_[v] != kNone) set(writes, at, bit_[v]);
    }
    if (block.condition != kNone) forUsed(graph_, block.condition, read);
    forEdges(graph_, block, b, [&](std::uint32_t to, std::size_t index) {
      for (const Value phi : graph_.blocks[to].phis) {
        const Value o = graph_.arguments(phi)[index];
        if (!graph_.isConstant(o)) set(arguments, at, bit_[o]);
      }
    });
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t b = blocks; b-- > 0;) {
      const ir::Block& block = graph_.blocks[b];
      for (std::size_t w = 0; w < words_; ++w) {
        std::uint64_t out = arguments[b * words_ + w];
        if (block.exit != ir::Block::Exit::End) out |= in_[block.next * words_ + w];
        if (block.exit == ir::Block::Exit::Branch) out |= in_[block.taken * words_ + w];
        out_[b * words_ + w] = out;
        const std::uint64_t in = reads[b * words_ + w] | (out & ~writes[b * words_ + w]);
        changed = changed || in != in_[b * words_ + w];
        in_[b * words_ + w] = in;
      }
    }
  }
}

template <typename F>
void IrLiveness::scan(std::uint32_t b, std::vector<char>& isLive, F at) const {
  const ir::Block& block = graph_.blocks[b];
  std::vector<Value> touched;
  std::uint32_t count = 0;
  const auto use = [&](Value v) {
    if (isLive[v] != 0) return;
    isLive[v] = 1;
    touched.push_back(v);
    ++count;
  };
  for (std::size_t w = 0; w < words_; ++w)
    for (std::uint64_t bits = out_[b * words_ + w]; bits != 0; bits &= bits - 1)
      use(globals_[w * 64 + static_cast<std::size_t>(__builtin_ctzll(bits))]);
  if (block.condition != kNone) forUsed(graph_, block.condition, use);
  bool more = at(block.body.size(), count);
  for (std::size_t n = block.body.size(); more && n-- > 0;) {
    const Value v = block.body[n];
    const Instruction& i = graph_.values[v];
    if (ir::isMask(i.kind)) continue;
    if (hasRegister(i) && isLive[v] != 0) {
      isLive[v] = 0;
      --count;
    }
    forUses(graph_, i, use);
    more = at(n, count);
  }
  for (const Value v : touched) isLive[v] = 0;
}

std::uint32_t IrLiveness::pressure(const ir::Loop& loop) const {
  return *std::max_element(pressure_.begin() + loop.header, pressure_.begin() + loop.last + 1);
}

std::vector<Value> IrLiveness::atPeak(std::uint32_t block, std::size_t& position) const {
  std::vector<char> isLive(graph_.values.size(), 0);
  std::vector<Value> values;
  scan(block, isLive, [&](std::size_t at, std::uint32_t count) {
    if (count < pressure_[block]) return true;
    position = at;
    for (Value v = 0; v < isLive.size(); ++v)
      if (isLive[v] != 0) values.push_back(v);
    return false;
  });
  return values;
}

}  // namespace qpu::compiler
