// Strength reduction: linear functions of an induction variable become induction variables.
// Reference: John Cocke and Ken Kennedy, "An Algorithm for Reduction of Operator Strength", 1977.
#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "compiler/ir_builder.hpp"
#include "compiler/loop_budget.hpp"
#include "compiler/optimise.hpp"

namespace qpu::compiler {

using ir::Graph;
using ir::Instruction;
using ir::Kind;
using ir::kNone;
using ir::Value;
using ir::Loop;
using isa::AddOp;

namespace {

struct Term {
  Value value;
  std::uint32_t multiple;
  bool operator==(const Term& o) const { return value == o.value && multiple == o.multiple; }
  bool operator<(const Term& o) const {
    return value != o.value ? value < o.value : multiple < o.multiple;
  }
};
// Represents coefficient * counter + constant + the sum of the terms.
struct Linear {
  Value counter = kNone;  // an induction variable: a phi at the start of the loop
  std::uint32_t coefficient = 0;
  std::uint32_t constant = 0;
  std::vector<Term> terms;     // sorted by value
  std::uint32_t operations = 0;  // number of operations in the loop that compute the function
};

constexpr std::size_t kMostTerms = 4;

bool isPower(std::uint32_t x) { return x != 0 && (x & (x - 1)) == 0; }
std::uint32_t logarithm(std::uint32_t x) {
  return static_cast<std::uint32_t>(__builtin_ctz(x));
}

class Reduction {
 public:
  Reduction(Graph& graph, std::uint32_t limit) : graph_(graph), budget_(graph, limit) {}

  void run() {
    findLastUses();
    for (auto n = static_cast<std::uint32_t>(graph_.loops.size()); n-- > 0;) loop(n);
  }

 private:
  struct Counter {
    Value init;
    Value next;
    Value step;
    bool down;
  };

  // Adds factor * y to x. Returns false if the sum is not linear in a single counter or has too
  // many terms.
  static bool add(Linear& x, const Linear& y, std::uint32_t factor) {
    if (x.counter != kNone && y.counter != kNone && x.counter != y.counter) return false;
    if (y.counter != kNone) x.counter = y.counter;
    x.coefficient += factor * y.coefficient;
    x.constant += factor * y.constant;
    x.operations = std::max(x.operations, y.operations);
    for (const Term& t : y.terms) {
      const auto at = std::find_if(x.terms.begin(), x.terms.end(),
                                   [&](const Term& u) { return u.value == t.value; });
      if (at == x.terms.end())
        x.terms.push_back({t.value, factor * t.multiple});
      else
        at->multiple += factor * t.multiple;
    }
    x.terms.erase(std::remove_if(x.terms.begin(), x.terms.end(),
                                 [](const Term& t) { return t.multiple == 0; }),
                  x.terms.end());
    std::sort(x.terms.begin(), x.terms.end());
    return x.terms.size() <= kMostTerms;
  }

  bool find(Value v, const Loop& l, Linear& out) const {
    const auto known = linear_.find(v);
    if (known != linear_.end()) {
      out = known->second;
      return true;
    }
    const Instruction& i = graph_.values[v];
    if (i.kind == Kind::Constant) {
      out.constant = i.bits;
      return true;
    }
    if (isInside(l, i.block)) return false;
    out.terms.push_back({v, 1});
    return true;
  }

  bool analyse(const Instruction& i, const Loop& l, Linear& out) const {
    if (i.kind != Kind::Alu) return false;
    Linear b;
    if (i.add == AddOp::Shl) {
      if (!graph_.isConstant(i.b) || !find(i.a, l, b)) return false;
      if (!add(out, b, 1U << (graph_.values[i.b].bits & 31U))) return false;
    } else if (i.add == AddOp::Add || i.add == AddOp::Sub) {
      if (!find(i.a, l, out) || !find(i.b, l, b)) return false;
      if (!add(out, b, i.add == AddOp::Sub ? UINT32_MAX : 1)) return false;
    } else {
      return false;
    }
    ++out.operations;
    return out.counter != kNone && out.coefficient != 0;
  }

  void findCounters(const Loop& l) {
    counters_.clear();
    for (const Value phi : graph_.blocks[l.header].phis) {
      const std::vector<Value>& arguments = graph_.arguments(phi);
      bool one = true;
      for (std::size_t k = 2; k < arguments.size(); ++k) one = one && arguments[k] == arguments[1];
      if (!one || graph_.isConstant(arguments[1])) continue;
      const Instruction& next = graph_.values[arguments[1]];
      if (next.kind != Kind::Alu || !isInside(l, next.block)) continue;
      Value step = kNone;
      if (next.add == AddOp::Add && next.a == phi) step = next.b;
      if (next.add == AddOp::Add && next.b == phi) step = next.a;
      if (next.add == AddOp::Sub && next.a == phi) step = next.b;
      if (step == kNone || step == phi || isInside(l, graph_.values[step].block)) continue;
      counters_[phi] = {arguments[0], arguments[1], step, next.add == AddOp::Sub};
      Linear self;
      self.counter = phi;
      self.coefficient = 1;
      linear_[phi] = self;
    }
  }

  void loop(std::uint32_t number) {
    const Loop l = graph_.loops[number];
    linear_.clear();
    findCounters(l);
    if (counters_.empty()) return;
    std::vector<Value> order;
    for (std::uint32_t b = l.header; b <= l.last; ++b)
      for (const Value v : graph_.blocks[b].body) {
        Linear form;
        if (!analyse(graph_.values[v], l, form)) continue;
        const Counter& c = counters_.at(form.counter);
        if (v == c.next) form.operations = 0;
        linear_[v] = form;
        order.push_back(v);
      }
    findRoots(l, order);
    convert(l, number, order);
  }

  // Finds the last block that uses each value. Values that the pass itself builds are used only
  // in their own loop.
  void findLastUses() {
    lastUse_.assign(graph_.values.size(), 0);
    for (std::uint32_t b = 0; b < graph_.blocks.size(); ++b) {
      const ir::Block& block = graph_.blocks[b];
      const auto use = [&](Value o, std::uint32_t in) { lastUse_[o] = std::max(lastUse_[o], in); };
      for (const Value v : block.body) forOperands(graph_.values[v], [&](Value o) { use(o, b); });
      for (const Value phi : block.phis)
        for (std::size_t k = 0; k < block.preds.size(); ++k)
          use(graph_.arguments(phi)[k], block.preds[k]);
    }
  }
  bool isUsedAfter(const Loop& l, Value v) const {
    return v < lastUse_.size() && lastUse_[v] > l.last;
  }

  // Finds the linear values that other instructions use.
  void findRoots(const Loop& l, const std::vector<Value>& linear) {
    roots_.clear();
    const auto use = [&](Value o) { roots_[o] = true; };
    for (std::uint32_t b = l.header; b <= l.last; ++b) {
      const ir::Block& block = graph_.blocks[b];
      for (const Value v : block.body)
        if (linear_.count(v) == 0) forOperands(graph_.values[v], use);
      for (const Value phi : block.phis)
        for (const Value o : graph_.arguments(phi)) use(o);
    }
    for (const Value v : linear)
      if (isUsedAfter(l, v)) use(v);
  }

  using Key = std::pair<std::pair<Value, std::uint32_t>, std::vector<Term>>;

  bool isReducible(const Linear& f) const {
    const Counter& c = counters_.at(f.counter);
    bool simple = graph_.isConstant(c.step) || isPower(f.coefficient);
    simple = simple && (isPower(f.coefficient) || graph_.isConstant(c.init));
    for (const Term& t : f.terms)
      simple = simple && (isPower(t.multiple) || isPower(0U - t.multiple));
    return simple;
  }

  void convert(const Loop& l, std::uint32_t number, const std::vector<Value>& order) {
    std::map<Key, std::vector<Value>> groups;
    std::vector<const Key*> inOrder;
    for (const Value v : order) {
      const Linear& f = linear_[v];
      if (roots_.count(v) == 0 || v == counters_.at(f.counter).next || !isReducible(f)) continue;
      if (isStep(v)) continue;
      const auto [entry, isNew] =
          groups.try_emplace({{f.counter, f.coefficient}, f.terms}, std::vector<Value>{});
      if (isNew) inOrder.push_back(&entry->first);
      entry->second.push_back(v);
    }
    std::unordered_map<Value, Value> replaced;
    for (const Key* key : inOrder) {
      const std::vector<Value>& values = groups[*key];
      bool isWorthwhile = false;
      for (const Value v : values) isWorthwhile = isWorthwhile || linear_[v].operations > 1;
      if (!isWorthwhile || !budget_.hasRoom(number)) continue;
      budget_.take(number);
      const Linear& first = linear_[values.front()];
      const Value phi = counter(l, first);
      for (const Value v : values) {
        const std::uint32_t difference = linear_[v].constant - first.constant;
        replaced[v] = difference == 0 ? phi : offset(v, phi, difference);
      }
    }
    bool after = false;
    for (const auto& [from, to] : replaced) after = after || isUsedAfter(l, from);
    const auto blocks = static_cast<std::uint32_t>(graph_.blocks.size());
    if (!replaced.empty()) replaceAll(replaced, after ? 0 : l.header, after ? blocks : l.last + 1);
  }

  // Returns true if v is the next iteration's value of an induction variable that this pass has
  // built.
  bool isStep(Value v) const { return steps_.count(v) != 0; }

  Value append(std::uint32_t block, Instruction i) {
    i.block = block;
    graph_.values.push_back(i);
    const auto v = static_cast<Value>(graph_.values.size() - 1);
    if (i.kind != Kind::Constant) graph_.blocks[block].body.push_back(v);
    return v;
  }

  // Replaces the instruction that computes v with phi + difference.
  Value offset(Value v, Value phi, std::uint32_t difference) {
    Instruction& i = graph_.values[v];
    i.kind = Kind::Alu;
    i.add = AddOp::Add;
    i.a = phi;
    Instruction constant;
    constant.bits = difference;
    const Value d = append(kNone, constant);
    graph_.values[v].b = d;
    return v;
  }

  Value counter(const Loop& l, const Linear& f) {
    const Counter c = counters_.at(f.counter);
    IrBuilder builder(graph_, true);
    builder.at(l.preheader);
    const auto times = [&](Value v, std::uint32_t factor) {
      if (graph_.isConstant(v)) return builder.constant(graph_.values[v].bits * factor);
      return builder.alu(AddOp::Shl, v, builder.constant(logarithm(factor)));
    };
    Value init = builder.alu(AddOp::Add, times(c.init, f.coefficient), builder.constant(f.constant));
    for (const Term& t : f.terms) {
      const bool negative = !isPower(t.multiple);
      const Value term = times(t.value, negative ? 0U - t.multiple : t.multiple);
      init = builder.alu(negative ? AddOp::Sub : AddOp::Add, init, term);
    }
    const Value step = times(c.step, f.coefficient);
    const Value phi = builder.phi(l.header);
    Instruction next;
    next.kind = Kind::Alu;
    next.add = c.down ? AddOp::Sub : AddOp::Add;
    next.a = phi;
    next.b = step;
    // Increment the new induction variable at the end of the block that increments the old one.
    const Value stepped = append(graph_.values[c.next].block, next);
    steps_[stepped] = true;
    std::vector<Value>& arguments = graph_.arguments(phi);
    arguments.assign(graph_.blocks[l.header].preds.size(), stepped);
    arguments[0] = init;
    return phi;
  }

  void replaceAll(const std::unordered_map<Value, Value>& replaced, std::uint32_t first,
                  std::uint32_t end) {
    const auto change = [&](Value& o) {
      const auto at = replaced.find(o);
      if (at != replaced.end()) o = at->second;
    };
    for (std::uint32_t n = first; n < end; ++n) {
      const ir::Block& b = graph_.blocks[n];
      for (const Value v : b.body) {
        if (replaced.count(v) != 0 && replaced.at(v) == v) continue;
        forOperands(graph_.values[v], change);
      }
      for (const Value phi : b.phis)
        for (Value& o : graph_.arguments(phi)) change(o);
    }
  }

  Graph& graph_;
  LoopBudget budget_;
  std::unordered_map<Value, Counter> counters_;
  std::unordered_map<Value, Linear> linear_;
  std::unordered_map<Value, bool> roots_;
  std::unordered_map<Value, bool> steps_;
  std::vector<std::uint32_t> lastUse_;  // indexed by value: the last block that uses the value
};

}  // namespace

void reduceStrength(Graph& graph, std::uint32_t limit) { Reduction(graph, limit).run(); }

}  // namespace qpu::compiler
