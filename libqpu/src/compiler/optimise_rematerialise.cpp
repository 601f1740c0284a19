// Computes values anew where they are used, instead of keeping them in registers
// that there are not enough of.
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "compiler/optimise.hpp"
#include "compiler/ir_liveness.hpp"

namespace qpu::compiler {

using ir::Graph;
using ir::Instruction;
using ir::Kind;
using ir::kNone;
using ir::Value;

namespace {

constexpr int kRounds = 12;
constexpr unsigned kDeepest = 3;        // operations in a row that are done again
constexpr double kLoopFactor = 8;       // a loop is taken to run so many times
constexpr std::uint32_t kDearest = 12;  // operations for one value

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

  // Operations that make v from constants and what is alive anyway; more than
  // kDearest when it cannot be done.
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
      default: return kDearest + 1;
    }
    if (depth == kDeepest) return kDearest + 1;
    std::uint32_t cost = i.kind == Kind::Alu || i.kind == Kind::Mul ? 1 : 2;
    forOperands(i, [&](Value o) {
      if (!isKept(o)) cost += costOf(o, depth + 1);
    });
    return cost;
  }
  bool isKept(Value v) const {
    return graph_.isConstant(v) || (kept_[v] != 0 && chosen_[v] == 0);
  }

  // At the fullest place: the values that are made anew. False when none helps.
  bool choose(const IrLiveness& live) {
    std::uint32_t worst = 0;
    for (std::uint32_t b = 0; b < graph_.blocks.size(); ++b)
      if (hopeless_.count(b) == 0 &&
          (live.pressure(b) > live.pressure(worst) || hopeless_.count(worst) != 0))
        worst = b;
    if (hopeless_.count(worst) != 0 || live.pressure(worst) <= limit_) return false;
    std::size_t place = 0;
    const std::vector<Value> alive = live.atPeak(worst, place);
    kept_.assign(graph_.values.size(), 0);
    chosen_.assign(graph_.values.size(), 0);
    for (const Value v : alive) kept_[v] = 1;
    std::vector<double> weight(graph_.values.size(), 0);
    weighUses(alive, weight);
    std::uint32_t wanted = live.pressure(worst) - limit_ + keepSources(alive);
    std::vector<Choice> choices;
    for (const Value v : alive) {
      const std::uint32_t cost = costOf(v, 0);
      // What is about to be used, or has just been made, gains nothing.
      if (cost > kDearest || isNear(v, worst, place)) continue;
      choices.push_back({v, cost * weight[v]});
    }
    std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
      return a.cost != b.cost ? a.cost < b.cost : a.value < b.value;
    });
    bool any = false;
    for (const Choice& c : choices) {
      if (wanted == 0) break;
      // Its operands may have been chosen meanwhile.
      if (isOperandOfChosen(c.value)) continue;
      const std::uint32_t cost = costOf(c.value, 0);
      if (cost > kDearest) continue;
      chosen_[c.value] = 1;
      markOperands(c.value, 0);
      any = true;
      --wanted;
    }
    if (!any) hopeless_[worst] = true;
    peakBlock_ = worst;
    peakPlace_ = place;
    return true;
  }

  // A value that many are made of is kept in their place. Returns how many such.
  std::uint32_t keepSources(const std::vector<Value>& alive) {
    constexpr std::uint32_t kMany = 3;
    std::unordered_map<Value, std::uint32_t> made;
    for (const Value v : alive) {
      if (costOf(v, 0) <= kDearest) continue;
      const Instruction& i = graph_.values[v];
      if (i.kind != Kind::Alu && i.kind != Kind::Mul && i.kind != Kind::Broadcast &&
          i.kind != Kind::Rotate)
        continue;
      Value missing = kNone;
      bool one = true;
      forOperands(i, [&](Value o) {
        if (isKept(o) || o == missing || costOf(o, 1) <= kDearest) return;
        one = missing == kNone;
        missing = o;
      });
      if (one) ++made[missing];
    }
    std::uint32_t kept = 0;
    for (const auto& [source, number] : made) {
      if (number < kMany) continue;
      kept_[source] = 1;
      ++kept;
    }
    return kept;
  }

  // Values that chosen ones are made of stay.
  bool isOperandOfChosen(Value v) const { return needed_.size() > v && needed_[v] == serial_; }
  void markOperands(Value v, unsigned depth) {
    if (needed_.size() < graph_.values.size()) needed_.resize(graph_.values.size(), 0);
    forOperands(graph_.values[v], [&](Value o) {
      if (graph_.isConstant(o)) return;
      if (kept_[o] != 0)
        needed_[o] = serial_;
      else if (depth < kDeepest)
        markOperands(o, depth + 1);
    });
  }

  void weighUses(const std::vector<Value>& alive, std::vector<double>& weight) const {
    std::vector<std::uint32_t> lastBlock(graph_.values.size(), kNone);
    std::vector<char> wanted(graph_.values.size(), 0);
    for (const Value v : alive) wanted[v] = 1;
    for (std::uint32_t b = 0; b < graph_.blocks.size(); ++b) {
      const auto use = [&](Value o) {
        if (wanted[o] == 0 || lastBlock[o] == b) return;
        lastBlock[o] = b;
        if (graph_.values[o].block != b) weight[o] += frequency(b);
      };
      for (const Value v : graph_.blocks[b].body) forOperands(graph_.values[v], use);
      for (const Value phi : graph_.blocks[b].phis)
        for (std::size_t way = 0; way < graph_.arguments(phi).size(); ++way) {
          const Value o = graph_.arguments(phi)[way];
          if (wanted[o] != 0) weight[o] += frequency(graph_.blocks[b].preds[way]);
        }
    }
  }

  bool isNear(Value v, std::uint32_t block, std::size_t place) const {
    constexpr std::size_t kNear = 8;
    const std::vector<Value>& body = graph_.blocks[block].body;
    const std::size_t from = place > kNear ? place - kNear : 0;
    const std::size_t to = std::min(body.size(), place + kNear);
    for (std::size_t n = from; n < to; ++n) {
      bool found = body[n] == v && n < place;
      if (n >= place)
        forOperands(graph_.values[body[n]], [&](Value o) { found = found || o == v; });
      if (found) return true;
    }
    return false;
  }

  // Every block that uses a chosen value makes its own, and the fullest place
  // parts the uses of its block.
  void rewrite() {
    for (std::uint32_t b = 0; b < graph_.blocks.size(); ++b) {
      std::vector<Value> body;
      std::unordered_map<Value, Value> here;
      const std::vector<Value> old = std::move(graph_.blocks[b].body);
      bool parted = false;
      const auto current = [&](Value o, std::uint32_t site) -> Value {
        if (graph_.isConstant(o)) return o;
        if (chosen_[o] == 0) return o;
        if (graph_.values[o].block == b && !parted) return o;
        const auto known = here.find(o);
        if (known != here.end()) return known->second;
        return again(o, b, site, body, here, 0);
      };
      for (std::size_t n = 0; n < old.size(); ++n) {
        if (b == peakBlock_ && n == peakPlace_) {
          parted = true;
          here.clear();
        }
        const Value v = old[n];
        const std::uint32_t site = graph_.values[v].site;
        Instruction changed = graph_.values[v];
        forOperands(changed, [&](Value& o) { o = current(o, site); });
        graph_.values[v] = changed;
        body.push_back(v);
      }
      if (b == peakBlock_ && peakPlace_ == old.size()) {
        parted = true;
        here.clear();
      }
      const auto arguments = [&](std::uint32_t to) {
        const std::vector<std::uint32_t> preds = graph_.blocks[to].preds;
        for (std::size_t way = 0; way < preds.size(); ++way) {
          if (preds[way] != b) continue;
          for (const Value phi : graph_.blocks[to].phis) {
            const Value o = current(graph_.arguments(phi)[way], graph_.blocks[b].site);
            graph_.arguments(phi)[way] = o;
          }
        }
      };
      if (graph_.blocks[b].exit != ir::Block::Exit::End) arguments(graph_.blocks[b].next);
      if (graph_.blocks[b].exit == ir::Block::Exit::Branch) arguments(graph_.blocks[b].taken);
      graph_.blocks[b].body = std::move(body);
    }
    ++serial_;
  }

  // Copies of v and of what it is made of that is not there.
  Value again(Value v, std::uint32_t block, std::uint32_t site, std::vector<Value>& body,
              std::unordered_map<Value, Value>& here, unsigned depth) {
    Instruction copy = graph_.values[v];
    copy.block = block;
    copy.site = site;
    forOperands(copy, [&](Value& o) {
      if (graph_.isConstant(o)) return;
      const auto known = here.find(o);
      if (known != here.end()) {
        o = known->second;
      } else if (chosen_[o] != 0 || (kept_[o] == 0 && depth < kDeepest)) {
        o = again(o, block, site, body, here, depth + 1);
      }
    });
    const auto fresh = static_cast<Value>(graph_.values.size());
    graph_.values.push_back(copy);
    kept_.push_back(0);
    chosen_.push_back(0);
    body.push_back(fresh);
    here[v] = fresh;
    return fresh;
  }

  Graph& graph_;
  const std::uint32_t limit_;
  std::vector<char> kept_;    // alive at the fullest place
  std::vector<char> chosen_;
  std::vector<std::uint32_t> needed_;
  std::uint32_t serial_ = 1;
  std::unordered_map<std::uint32_t, bool> hopeless_;
  std::uint32_t peakBlock_ = 0;
  std::size_t peakPlace_ = 0;
};

}  // namespace

void rematerialiseValues(Graph& graph, std::uint32_t limit) { Rematerialiser(graph, limit).run(); }

}  // namespace qpu::compiler
