#include "compiler/optimise.hpp"

#include <algorithm>

namespace qpu::compiler {

using ir::Graph;
using ir::Instruction;
using ir::Kind;
using ir::kNone;
using ir::Value;
using isa::AddOp;

namespace {

// The value that stands for v, with the way there made short.
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
      auto kept = b.phis.begin();
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
          *kept++ = phi;
          continue;
        }
        replaced[phi] = only;
        changed = true;
      }
      b.phis.erase(kept, b.phis.end());
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

namespace {

// Stride of a pure value from those of its operands.
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
  // Phis start with what comes from before the loop, and lose it where the
  // other ways disagree.
  std::vector<bool> settled(graph.values.size(), false);
  const auto differ = [](const Stride& a, const Stride& b) {
    return a.known != b.known || (a.known && a.step != b.step);
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (const ir::Block& b : graph.blocks) {
      for (const Value phi : b.phis) {
        if (settled[phi] && !known[phi].known) continue;
        const std::vector<Value>& arguments = graph.arguments(phi);
        Stride s = known[arguments[0]];
        if (settled[phi])
          for (const Value argument : arguments)
            if (differ(s, known[argument])) s = {};
        if (settled[phi] && !differ(s, known[phi])) continue;
        settled[phi] = true;
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

void lowerLoads(Graph& graph, const std::vector<Stride>& known) {
  Value offsets = kNone;  // 0, 4, .., 60
  std::vector<Value> prelude;
  const auto make = [&graph](Instruction i, const Instruction& at) {
    i.block = at.block;
    i.site = at.site;
    graph.values.push_back(i);
    return static_cast<Value>(graph.values.size() - 1);
  };
  for (std::uint32_t b = 0; b < graph.blocks.size(); ++b) {
    std::vector<Value> body;
    const std::vector<Value> old = graph.blocks[b].body;
    for (const Value v : old) {
      const Instruction load = graph.values[v];
      if (load.kind != Kind::Load) {
        body.push_back(v);
        continue;
      }
      const Stride stride = load.a < known.size() ? known[load.a] : Stride{};
      Value address = load.a;
      if (!stride.known || stride.step != 4) {
        if (offsets == kNone) {
          Instruction entry;
          entry.block = 0;
          Instruction element;
          element.kind = Kind::Element;
          prelude.push_back(make(element, entry));
          Instruction two;
          two.kind = Kind::Constant;
          two.bits = 2;
          Instruction shift;
          shift.kind = Kind::Alu;
          shift.add = AddOp::Shl;
          shift.a = prelude.back();
          shift.b = make(two, {});
          offsets = make(shift, entry);
          prelude.push_back(offsets);
        }
        if (!stride.known || stride.step != 0) {
          Instruction broadcast;
          broadcast.kind = Kind::Broadcast;
          broadcast.a = address;
          address = make(broadcast, load);
          body.push_back(address);
        }
        Instruction sum;
        sum.kind = Kind::Alu;
        sum.add = AddOp::Add;
        sum.a = address;
        sum.b = offsets;
        address = make(sum, load);
        body.push_back(address);
      }
      const std::uint8_t unit = load.unit;
      Instruction request;
      request.kind = Kind::Effect;
      request.op = Op::TmuRequest;
      request.unit = unit;
      request.a = address;
      body.push_back(make(request, load));
      Instruction& receive = graph.values[v];
      receive.kind = Kind::Effect;
      receive.op = Op::TmuReceive;
      receive.unit = unit;
      receive.a = kNone;
      body.push_back(v);
    }
    graph.blocks[b].body = std::move(body);
  }
  std::vector<Value>& entry = graph.blocks[0].body;
  entry.insert(entry.begin(), prelude.begin(), prelude.end());
}

}  // namespace qpu::compiler
