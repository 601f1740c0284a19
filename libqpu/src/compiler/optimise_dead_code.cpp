// Dead code elimination and removal of redundant phis. References: Ron Cytron, Jeanne Ferrante, Barry K. Rosen, Mark N.
// Wegman and F. Kenneth Zadeck, "Efficiently Computing Static Single Assignment Form and the Control Dependence Graph",
// 1991; Matthias Braun et al., "Simple and Efficient Construction of Static Single Assignment Form", 2013.
#include "compiler/optimise.hpp"

#include <algorithm>

namespace qpu::compiler {

using ir::Graph;
using ir::Kind;
using ir::kNone;
using ir::Value;

namespace {

// Returns the last value in the chain of replacements of v. Also shortens the chains in `replaced`
// (path compression).
Value resolve(std::vector<Value>& replaced, Value v) {
  Value last = v;
  while (replaced[last] != kNone) last = replaced[last];
  while (replaced[v] != kNone) {
    const Value next = replaced[v];
    replaced[v] = last;
    v = next;
  }
  return last;
}

void replace(Graph& graph, std::vector<Value>& replaced) {
  for (ir::Block& b : graph.blocks) {
    for (const Value v : b.body)
      forOperands(graph.values[v], [&](Value& o) { o = resolve(replaced, o); });
    for (const Value phi : b.phis)
      for (Value& o : graph.arguments(phi)) o = resolve(replaced, o);
    if (b.condition != kNone) b.condition = resolve(replaced, b.condition);
  }
}

}  // namespace

void simplifyPhis(Graph& graph) {
  std::vector<Value> replaced(graph.values.size(), kNone);
  for (bool changed = true; changed;) {
    changed = false;
    for (ir::Block& b : graph.blocks) {
      auto end = b.phis.begin();
      for (const Value phi : b.phis) {
        Value only = kNone;
        bool several = false;
        for (Value& argument : graph.arguments(phi)) {
          argument = resolve(replaced, argument);
          if (argument == phi || argument == only) continue;
          several = several || only != kNone;
          only = argument;
        }
        if (several || only == kNone) {
          *end++ = phi;
          continue;
        }
        replaced[phi] = only;
        changed = true;
      }
      b.phis.erase(end, b.phis.end());
    }
  }
  replace(graph, replaced);
}

void eliminateDeadCode(Graph& graph) {
  std::vector<bool> used(graph.values.size(), false);
  std::vector<Value> work;
  const auto use = [&](Value v) {
    if (used[v]) return;
    used[v] = true;
    work.push_back(v);
  };
  for (const ir::Block& b : graph.blocks) {
    for (const Value v : b.body)
      if (graph.values[v].kind == Kind::Effect) use(v);
    if (b.condition != kNone) use(b.condition);
  }
  while (!work.empty()) {
    const Value v = work.back();
    work.pop_back();
    if (graph.values[v].kind == Kind::Phi)
      for (const Value o : graph.arguments(v)) use(o);
    forOperands(graph.values[v], use);
  }
  const auto unused = [&](Value v) { return !used[v]; };
  for (ir::Block& b : graph.blocks) {
    b.body.erase(std::remove_if(b.body.begin(), b.body.end(), unused), b.body.end());
    b.phis.erase(std::remove_if(b.phis.begin(), b.phis.end(), unused), b.phis.end());
  }
}

}  // namespace qpu::compiler
