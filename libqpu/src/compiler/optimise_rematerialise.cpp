// Rematerialisation on the intermediate representation: if there are not enough registers to keep
// all values, cheap values are recomputed where they are used. Reference: Preston Briggs, Keith D.
// Cooper and Linda Torczon, "Rematerialization", 1992.
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "compiler/ir_liveness.hpp"
#include "compiler/optimise.hpp"

namespace qpu::compiler {

using ir::Graph;
using ir::Instruction;
using ir::Kind;
using ir::kNone;
using ir::Value;

namespace {

constexpr int kRounds = 12;
constexpr unsigned kMostDepth = 3;      // maximum depth of the chain of rematerialised operands
constexpr double kLoopFactor = 8;       // assumed number of iterations of a loop
constexpr std::uint32_t kMostCost = 12;  // maximum number of operations to rematerialise one value

class Rematerialiser {
 public:
  Rematerialiser(Graph& graph, std::uint32_t limit) : graph_(graph), limit_(limit) {}

  void run() {
    for (int round = 0; round < kRounds; ++round) {
      const IrLiveness live(graph_);
      if (!choose(live)) return;
      rewrite();
      eliminateDeadCode(graph_);
    }
  }

 private:
  struct Choice {
    Value value;
    double cost;
  };

  double frequency(std::uint32_t block) const {
    double f = 1;
    for (std::uint32_t d = graph_.depth(block); d > 0; --d) f *= kLoopFactor;
    return f;
  }

  // Returns the number of operations that compute v from constants and from values that are live
  // anyway at the point of highest register pressure (the peak). If v cannot be computed from these
  // values, returns a number greater than kMostCost.
  std::uint32_t costOf(Value v, unsigned depth) const {
    const Instruction& i = graph_.values[v];
    switch (i.kind) {
      case Kind::Constant: return 0;
      case Kind::Element:
      case Kind::Literal: return 1;
      case Kind::Alu:
      case Kind::Mul:
      case Kind::Broadcast:
      case Kind::Rotate: break;
      default: return kMostCost + 1;
    }
    if (depth == kMostDepth) return kMostCost + 1;
    std::uint32_t cost = i.kind == Kind::Alu || i.kind == Kind::Mul ? 1 : 2;
    forOperands(i, [&](Value o) {
      if (!isAvailable(o)) cost += costOf(o, depth + 1);
    });
    return cost;
  }
  bool isAvailable(Value v) const {
    return graph_.isConstant(v) || (isLive_[v] != 0 && chosen_[v] == 0);
  }

  // Chooses values to rematerialise from those that are live at the point of highest register
  // pressure. Returns false if there is no block whose pressure this pass can reduce.
  bool choose(const IrLiveness& live) {
    std::uint32_t peak = 0;
    for (std::uint32_t b = 0; b < graph_.blocks.size(); ++b)
      if (isIrreducible_.count(b) == 0 &&
          (live.pressure(b) > live.pressure(peak) || isIrreducible_.count(peak) != 0))
        peak = b;
    if (isIrreducible_.count(peak) != 0 || live.pressure(peak) <= limit_) return false;
    std::size_t position = 0;
    const std::vector<Value> atPeak = live.atPeak(peak, position);
    isLive_.assign(graph_.values.size(), 0);
    chosen_.assign(graph_.values.size(), 0);
    for (const Value v : atPeak) isLive_[v] = 1;
    std::vector<double> weight(graph_.values.size(), 0);
    weighUses(atPeak, weight);
    std::uint32_t needed = live.pressure(peak) - limit_ + keepOperands(atPeak);
    std::vector<Choice> choices;
    for (const Value v : atPeak) {
      const std::uint32_t cost = costOf(v, 0);
      // Rematerialising a value that is used or defined close to the peak does not reduce the
      // register pressure at the peak.
      if (cost > kMostCost || isNear(v, peak, position)) continue;
      choices.push_back({v, cost * weight[v]});
    }
    std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
      return a.cost != b.cost ? a.cost < b.cost : a.value < b.value;
    });
    bool any = false;
    for (const Choice& c : choices) {
      if (needed == 0) break;
      // An operand of a chosen value must stay live, so the operand is not chosen itself.
      if (isOperandOfChosen(c.value)) continue;
      const std::uint32_t cost = costOf(c.value, 0);
      if (cost > kMostCost) continue;
      chosen_[c.value] = 1;
      markOperands(c.value, 0);
      any = true;
      --needed;
    }
    if (!any) isIrreducible_[peak] = true;
    peakBlock_ = peak;
    peakPosition_ = position;
    return true;
  }

  // Keeps a value live if many other values can be computed from it. Returns the number of
  // additional values that are kept live.
  std::uint32_t keepOperands(const std::vector<Value>& atPeak) {
    constexpr std::uint32_t kMany = 3;
    std::unordered_map<Value, std::uint32_t> dependents;
    for (const Value v : atPeak) {
      if (costOf(v, 0) <= kMostCost) continue;
      const Instruction& i = graph_.values[v];
      if (i.kind != Kind::Alu && i.kind != Kind::Mul && i.kind != Kind::Broadcast &&
          i.kind != Kind::Rotate)
        continue;
      Value missing = kNone;
      bool one = true;
      forOperands(i, [&](Value o) {
        if (isAvailable(o) || o == missing || costOf(o, 1) <= kMostCost) return;
        one = missing == kNone;
        missing = o;
      });
      if (one) ++dependents[missing];
    }
    std::uint32_t count = 0;
    for (const auto& [source, number] : dependents) {
      if (number < kMany) continue;
      isLive_[source] = 1;
      ++count;
    }
    return count;
  }

  // Operands of the chosen values must stay live.
  bool isOperandOfChosen(Value v) const { return needed_.size() > v && needed_[v] == serial_; }
  void markOperands(Value v, unsigned depth) {
    if (needed_.size() < graph_.values.size()) needed_.resize(graph_.values.size(), 0);
    forOperands(graph_.values[v], [&](Value o) {
      if (graph_.isConstant(o)) return;
      if (isLive_[o] != 0)
        needed_[o] = serial_;
      else if (depth < kMostDepth)
        markOperands(o, depth + 1);
    });
  }

  void weighUses(const std::vector<Value>& atPeak, std::vector<double>& weight) const {
    std::vector<std::uint32_t> lastBlock(graph_.values.size(), kNone);
    std::vector<char> needed(graph_.values.size(), 0);
    for (const Value v : atPeak) needed[v] = 1;
    for (std::uint32_t b = 0; b < graph_.blocks.size(); ++b) {
      const auto use = [&](Value o) {
        if (needed[o] == 0 || lastBlock[o] == b) return;
        lastBlock[o] = b;
        if (graph_.values[o].block != b) weight[o] += frequency(b);
      };
      for (const Value v : graph_.blocks[b].body) forOperands(graph_.values[v], use);
      for (const Value phi : graph_.blocks[b].phis)
        for (std::size_t k = 0; k < graph_.arguments(phi).size(); ++k) {
          const Value o = graph_.arguments(phi)[k];
          if (needed[o] != 0) weight[o] += frequency(graph_.blocks[b].preds[k]);
        }
    }
  }

  bool isNear(Value v, std::uint32_t block, std::size_t position) const {
    constexpr std::size_t kNear = 8;
    const std::vector<Value>& body = graph_.blocks[block].body;
    const std::size_t from = position > kNear ? position - kNear : 0;
    const std::size_t to = std::min(body.size(), position + kNear);
    for (std::size_t n = from; n < to; ++n) {
      bool found = body[n] == v && n < position;
      if (n >= position)
        forOperands(graph_.values[body[n]], [&](Value o) { found = found || o == v; });
      if (found) return true;
    }
    return false;
  }

  // Inserts the recomputations. Each block that uses a chosen value recomputes the value once. In
  // the block that contains the peak, the uses after the peak get a separate recomputation.
  void rewrite() {
    for (std::uint32_t b = 0; b < graph_.blocks.size(); ++b) {
      std::vector<Value> body;
      std::unordered_map<Value, Value> here;
      const std::vector<Value> old = std::move(graph_.blocks[b].body);
      bool isAfterPeak = false;
      const auto current = [&](Value o, std::uint32_t site) -> Value {
        if (graph_.isConstant(o)) return o;
        if (chosen_[o] == 0) return o;
        if (graph_.values[o].block == b && !isAfterPeak) return o;
        const auto known = here.find(o);
        if (known != here.end()) return known->second;
        return rematerialise(o, b, site, body, here, 0);
      };
      for (std::size_t n = 0; n < old.size(); ++n) {
        if (b == peakBlock_ && n == peakPosition_) {
          isAfterPeak = true;
          here.clear();
        }
        const Value v = old[n];
        const std::uint32_t site = graph_.values[v].site;
        Instruction changed = graph_.values[v];
        forOperands(changed, [&](Value& o) { o = current(o, site); });
        graph_.values[v] = changed;
        body.push_back(v);
      }
      if (b == peakBlock_ && peakPosition_ == old.size()) {
        isAfterPeak = true;
        here.clear();
      }
      const auto arguments = [&](std::uint32_t to) {
        const std::vector<std::uint32_t> preds = graph_.blocks[to].preds;
        for (std::size_t k = 0; k < preds.size(); ++k) {
          if (preds[k] != b) continue;
          for (const Value phi : graph_.blocks[to].phis) {
            const Value o = current(graph_.arguments(phi)[k], graph_.blocks[b].site);
            graph_.arguments(phi)[k] = o;
          }
        }
      };
      if (graph_.blocks[b].exit != ir::Block::Exit::End) arguments(graph_.blocks[b].next);
      if (graph_.blocks[b].exit == ir::Block::Exit::Branch) arguments(graph_.blocks[b].taken);
      graph_.blocks[b].body = std::move(body);
    }
    ++serial_;
  }

  // Recomputes v and those of its operands that are not live.
  Value rematerialise(Value v, std::uint32_t block, std::uint32_t site, std::vector<Value>& body,
              std::unordered_map<Value, Value>& here, unsigned depth) {
    Instruction copy = graph_.values[v];
    copy.block = block;
    copy.site = site;
    forOperands(copy, [&](Value& o) {
      if (graph_.isConstant(o)) return;
      const auto known = here.find(o);
      if (known != here.end()) {
        o = known->second;
      } else if (chosen_[o] != 0 || (isLive_[o] == 0 && depth < kMostDepth)) {
        o = rematerialise(o, block, site, body, here, depth + 1);
      }
    });
    const auto fresh = static_cast<Value>(graph_.values.size());
    graph_.values.push_back(copy);
    isLive_.push_back(0);
    chosen_.push_back(0);
    body.push_back(fresh);
    here[v] = fresh;
    return fresh;
  }

  Graph& graph_;
  const std::uint32_t limit_;
  std::vector<char> isLive_;  // indexed by value: true if the value is live at the peak
  std::vector<char> chosen_;
  std::vector<std::uint32_t> needed_;
  std::uint32_t serial_ = 1;
  std::unordered_map<std::uint32_t, bool> isIrreducible_;
  std::uint32_t peakBlock_ = 0;
  std::size_t peakPosition_ = 0;
};

}  // namespace

void rematerialiseValues(Graph& graph, std::uint32_t limit) { Rematerialiser(graph, limit).run(); }

}  // namespace qpu::compiler
