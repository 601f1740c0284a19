// Element strides: determines for each value whether its elements are equal or form an arithmetic
// sequence. The pass is a data-flow analysis similar to the divergence analysis of SIMT programs.
// Reference: Bruno Coutinho, Diogo Sampaio, Fernando Magno Quintao Pereira and Wagner Meira Jr.,
// "Divergence Analysis and Optimizations", 2011.
#include "compiler/optimise.hpp"

namespace qpu::compiler {

using ir::Graph;
using ir::Instruction;
using ir::Kind;
using ir::kNone;
using ir::Value;
using isa::AddOp;

namespace {

// Derives the stride of a pure value from the strides of its operands.
class StrideRules {
 public:
  StrideRules(const Graph& graph, const std::vector<Stride>& known)
      : graph_(graph), known_(known) {}

  Stride of(const Instruction& i) const {
    switch (i.kind) {
      case Kind::Constant:
      case Kind::Literal:
      case Kind::Uniform:
      case Kind::Broadcast: return {true, 0};
      case Kind::Element: return {true, 1};
      case Kind::Rotate: return {equal(i.a), 0};
      case Kind::Alu: return alu(i);
      case Kind::Select: {
        const Stride a = known_[i.a];
        const Stride b = known_[i.b];
        return {equal(i.c) && a.known && b.known && a.step == b.step, a.step};
      }
      case Kind::Mul:
      case Kind::Sfu:
      case Kind::Compare:
      case Kind::MaskAnd:
      case Kind::MaskOr:
      case Kind::MaskNot: {
        bool all = true;
        forOperands(i, [&](Value o) { all = all && equal(o); });
        return {all, 0};
      }
      case Kind::Phi:
      case Kind::Load:
      case Kind::Effect: break;
    }
    return {};
  }

 private:
  bool equal(Value v) const { return known_[v].known && known_[v].step == 0; }

  Stride alu(const Instruction& i) const {
    const Stride a = known_[i.a];
    const Stride b = known_[i.b];
    const bool both = a.known && b.known;
    switch (i.add) {
      case AddOp::Add: return {both, a.step + b.step};
      case AddOp::Sub: return {both, a.step - b.step};
      case AddOp::Shl:
        if (a.known && graph_.isConstant(i.b))
          return {true, a.step << (graph_.values[i.b].bits & 31U)};
        break;
      default: break;
    }
    return {equal(i.a) && equal(i.b), 0};
  }

  const Graph& graph_;
  const std::vector<Stride>& known_;
};

}  // namespace

std::vector<Stride> strides(const Graph& graph) {
  std::vector<Stride> known(graph.values.size());
  const StrideRules rules(graph, known);
  for (Value v = 0; v < graph.values.size(); ++v)
    if (graph.values[v].kind == Kind::Constant || graph.values[v].kind == Kind::Uniform)
      known[v] = {true, 0};
  // A phi starts with the stride of its first argument, which is defined before the loop. If the
  // stride of another argument differs, the phi's stride becomes unknown.
  std::vector<bool> visited(graph.values.size(), false);
  const auto differ = [](const Stride& a, const Stride& b) {
    return a.known != b.known || (a.known && a.step != b.step);
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (const ir::Block& b : graph.blocks) {
      for (const Value phi : b.phis) {
        if (visited[phi] && !known[phi].known) continue;
        const std::vector<Value>& arguments = graph.arguments(phi);
        Stride s = known[arguments[0]];
        if (visited[phi])
          for (const Value argument : arguments)
            if (differ(s, known[argument])) s = {};
        if (visited[phi] && !differ(s, known[phi])) continue;
        visited[phi] = true;
        known[phi] = s;
        changed = true;
      }
      for (const Value v : b.body) {
        const Stride s = rules.of(graph.values[v]);
        if (!differ(s, known[v])) continue;
        known[v] = s;
        changed = true;
      }
    }
  }
  return known;
}

}  // namespace qpu::compiler
