// Loop-invariant code motion, limited by register pressure. Reference: Alfred V. Aho, Monica S.
// Lam, Ravi Sethi and Jeffrey D. Ullman, "Compilers: Principles, Techniques, and Tools", 2006,
// section 9.5.
#include <utility>

#include "compiler/loop_budget.hpp"
#include "compiler/optimise.hpp"

namespace qpu::compiler {

using ir::Graph;
using ir::Instruction;
using ir::Kind;
using ir::kNone;
using ir::Value;
using ir::Loop;

namespace {

std::vector<std::uint32_t> countUses(const Graph& graph) {
  std::vector<std::uint32_t> uses(graph.values.size(), 0);
  for (const ir::Block& b : graph.blocks) {
    for (const Value v : b.body) forOperands(graph.values[v], [&](Value o) { ++uses[o]; });
    for (const Value phi : b.phis)
      for (const Value o : graph.arguments(phi)) ++uses[o];
    if (b.condition != kNone) ++uses[b.condition];
  }
  return uses;
}

}  // namespace

void hoistInvariants(Graph& graph, std::uint32_t limit) {
  LoopBudget budget(graph, limit);
  const std::vector<std::uint32_t> uses = countUses(graph);
  std::vector<std::uint32_t> hoistedFrom(graph.values.size(), kNone);
  for (auto n = static_cast<std::uint32_t>(graph.loops.size()); n-- > 0;) {
    const Loop loop = graph.loops[n];
    std::vector<Value> hoisted;
    const auto isInvariant = [&](const Instruction& i) {
      bool all = ir::isPure(i) && !ir::isMask(i.kind) && i.kind != Kind::Select;
      forOperands(i, [&](Value o) { all = all && !isInside(loop, graph.values[o].block); });
      return all;
    };
    for (std::uint32_t b = loop.header; b <= loop.last; ++b) {
      std::vector<Value>& body = graph.blocks[b].body;
      auto end = body.begin();
      for (const Value v : body) {
        Instruction& i = graph.values[v];
        if (!isInvariant(i) || !budget.hasRoom(n)) {
          *end++ = v;
          continue;
        }
        i.block = loop.preheader;
        hoisted.push_back(v);
        hoistedFrom[v] = n;
        budget.take(n);
        // If an operand was hoisted only for this value, the operand is no longer live in the
        // loop.
        forOperands(i, [&](Value o) {
          if (uses[o] == 1 && hoistedFrom[o] == n) budget.giveBack(n);
        });
      }
      body.erase(end, body.end());
    }
    std::vector<Value>& before = graph.blocks[loop.preheader].body;
    before.insert(before.end(), hoisted.begin(), hoisted.end());
  }
}

}  // namespace qpu::compiler
