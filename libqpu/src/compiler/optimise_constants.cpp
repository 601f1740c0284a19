// Constant hoisting: constants that need a register are loaded before the loops that use the
// constants. LLVM's ConstantHoisting pass does the same for constants that are expensive to
// materialise.
#include <algorithm>
#include <unordered_map>

#include "compiler/immediates.hpp"
#include "compiler/loop_budget.hpp"
#include "compiler/optimise.hpp"

namespace qpu::compiler {

using ir::Graph;
using ir::Instruction;
using ir::Kind;
using ir::kNone;
using ir::Loop;
using ir::Value;

namespace {

class ConstantHoisting {
 public:
  ConstantHoisting(Graph& graph, std::uint32_t limit) : graph_(graph), budget_(graph, limit) {}

  void run() {
    for (std::uint32_t n = 0; n < graph_.loops.size(); ++n) {
      for (std::uint32_t l = graph_.loops[n].parent; l != kNone; l = graph_.loops[l].parent)
        for (std::uint32_t k = 0; k < taken_[l]; ++k) budget_.take(n);
      taken_.push_back(0);
      loop(n);
    }
  }

 private:
  struct Demand {
    std::uint32_t bits;
    double weight;
  };

  void loop(std::uint32_t n) {
    const Loop l = graph_.loops[n];
    std::unordered_map<std::uint32_t, double> weights;
    // Indexed by constant: the block in which the constant was last counted.
    std::unordered_map<std::uint32_t, std::uint32_t> last;
    double frequency = 1;
    for (std::uint32_t b = l.header; b <= l.last; ++b) {
      frequency = 1;
      for (std::uint32_t d = graph_.depth(b); d > l.depth; --d) frequency *= 8;
      for (const Value v : graph_.blocks[b].body)
        forConstantsInRegisters(graph_, graph_.values[v], [&](Value& o) {
          const std::uint32_t bits = graph_.values[o].bits;
          const auto [entry, isNew] = last.try_emplace(bits, b);
          if (!isNew && entry->second == b) return;
          entry->second = b;
          weights[bits] += frequency;
        });
    }
    std::vector<Demand> demands;
    demands.reserve(weights.size());
    for (const auto& [bits, weight] : weights) demands.push_back({bits, weight});
    std::sort(demands.begin(), demands.end(), [](const Demand& a, const Demand& b) {
      return a.weight != b.weight ? a.weight > b.weight : a.bits < b.bits;
    });
    if (demands.size() > budget_.room(n)) demands.resize(budget_.room(n));
    if (demands.empty()) return;
    std::unordered_map<std::uint32_t, Value> literals;
    for (const Demand& d : demands) {
      Instruction i;
      i.kind = Kind::Literal;
      i.bits = d.bits;
      i.block = l.preheader;
      graph_.values.push_back(i);
      literals[d.bits] = static_cast<Value>(graph_.values.size() - 1);
      graph_.blocks[l.preheader].body.push_back(literals[d.bits]);
      budget_.take(n);
      ++taken_[n];
    }
    for (std::uint32_t b = l.header; b <= l.last; ++b)
      for (const Value v : graph_.blocks[b].body)
        forConstantsInRegisters(graph_, graph_.values[v], [&](Value& o) {
          const auto at = literals.find(graph_.values[o].bits);
          if (at != literals.end()) o = at->second;
        });
  }

  Graph& graph_;
  LoopBudget budget_;
  std::vector<std::uint32_t> taken_;
};

}  // namespace

void hoistConstants(Graph& graph, std::uint32_t limit) { ConstantHoisting(graph, limit).run(); }

}  // namespace qpu::compiler
