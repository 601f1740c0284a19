#include "isa/verify.hpp"

#include <algorithm>
#include <deque>
#include <tuple>
#include <unordered_map>

#include "isa/access.hpp"
#include "isa/flow.hpp"
#include "isa/graph.hpp"
#include "isa/rules.hpp"
#include "isa/text.hpp"

namespace qpu::isa {
namespace {

// The maximum distance between two instructions that a rule concerns.
constexpr std::size_t kMostDistance = 3;

bool isReservedPmPack(std::uint8_t pack) { return pack != 0 && (pack < 3 || pack > 7); }

bool isTriggering(std::uint8_t a) {
  return a == address::kTmuNoSwap || a == address::kUniformsAddress || a >= kTlbFirst;
}

// Returns true if the address refers to a different register in each file.
bool isSided(std::uint8_t a) {
  return a == address::kVpmSetup || a == address::kDmaAddress || a == 41 || a == kMsFlags;
}

// Returns true if both pipes always produce the same result. Examples are a load of an immediate,
// and two moves of the same source.
bool haveSameResult(const Instruction& i) {
  if (i.form != Form::Alu) return i.form != Form::Branch;
  const bool rotates = i.signal == Signal::SmallImmediate && i.raddrB >= 48;
  return i.opAdd == AddOp::Or && i.opMul == MulOp::V8Min && i.addA == i.addB &&
         i.mulA == i.mulB && i.addA == i.mulA && !rotates;
}

class Verifier {
 public:
  explicit Verifier(const std::vector<Word>& program) : program_(program) {
    for (std::size_t n = 0; n < program.size(); ++n) {
      const auto decoded = decode(program[n]);
      if (!decoded) fault(n, n, RuleId::UnknownInstruction);
      instructions_.push_back(decoded.value_or(Instruction()));
      accesses_.push_back(accessOf(instructions_.back()));
    }
  }

  std::vector<Fault> run() {
    if (program_.empty()) fault(0, 0, RuleId::RunsOut, "the program is empty");
    for (std::size_t n = 0; n < program_.size(); ++n) single(n);
    const Graph graph(instructions_);
    for (const std::size_t n : graph.leaving()) fault(n, n, RuleId::RunsOut);
    flow(graph);
    for (const Graph::Node n : graph.reachable()) {
      place(n);
      near(graph, n);
    }
    return result();
  }

 private:
  struct Found {
    std::size_t instruction;
    std::size_t cause;
    RuleId rule;
    std::string detail;
    auto key() const { return std::tie(instruction, cause, rule, detail); }
    bool operator<(const Found& other) const { return key() < other.key(); }
    bool operator==(const Found& other) const { return key() == other.key(); }
  };

  void fault(std::size_t at, std::size_t cause, RuleId rule, const std::string& detail = {}) {
    found_.push_back({at, cause, rule, detail});
  }

  std::string listed(std::size_t n) const {
    std::string text = "instruction " + std::to_string(n);
    if (n < program_.size()) text += " (" + disassemble(program_[n]) + ")";
    return text;
  }

  std::vector<Fault> result() {
    std::sort(found_.begin(), found_.end());
    found_.erase(std::unique(found_.begin(), found_.end()), found_.end());
    std::vector<Fault> faults;
    faults.reserve(found_.size());
    for (const Found& f : found_) {
      const Rule& rule = rules()[static_cast<std::size_t>(f.rule)];
      std::string text = listed(f.instruction);
      if (f.cause != f.instruction) text += " after " + listed(f.cause);
      text += std::string(": ") + rule.text;
      if (!f.detail.empty()) text += ": " + f.detail;
      faults.push_back({f.instruction, f.cause, rule.name, text});
    }
    return faults;
  }

  // Rules for single instructions.

  void single(std::size_t n) {
    const Instruction& i = instructions_[n];
    const Access& a = accesses_[n];
    const auto report = [&](RuleId rule, const std::string& detail = {}) {
      fault(n, n, rule, detail);
    };
    if (i.form == Form::Alu) {
      signals(n);
      if (i.opAdd == AddOp::Nop && i.waddrAdd != address::kNop) report(RuleId::NopWrites, "ADD");
      if (i.opMul == MulOp::Nop && i.waddrMul != address::kNop) report(RuleId::NopWrites, "MUL");
      unpacks(n);
    }
    if (i.form == Form::Branch) {
      std::size_t target = 0;
      if (!branchTarget(i, n, program_.size(), target)) report(RuleId::BranchTarget);
    } else {
      packs(n);
    }
    if (a.writes == 2) {
      const Write& w = a.write[0];
      const bool same = w.address == a.write[1].address && w.address >= 32 && !isSided(w.address);
      const bool bothWrite = w.isIo() || (!w.never && !a.write[1].never);
      const bool equal = haveSameResult(i) && i.pack == 0 && w.address != address::kR5;
      if (same && bothWrite && !equal) report(RuleId::SameDestination);
    }
    for (const std::uint8_t io : {address::kUniform, kVarying, address::kVpm})
      if (a.portA == io && a.portB == io) report(RuleId::IoReadTwice);
    peripherals(n);
    for (const Write& w : a)
      if (isTriggering(w.address) && !w.always) report(RuleId::ConditionalTrigger);
    const bool pair = (a.vpm & (a.vpm - 1)) != 0 && a.vpm != (kVpmRead | kVpmWrite);
    const bool load = i.signal == Signal::LoadTmu0 || i.signal == Signal::LoadTmu1;
    if (pair || (load && a.vpm != 0)) report(RuleId::VpmPair);
    if (a.ends)
      for (const Write& w : a)
        if (w.isRegister()) report(RuleId::EndWritesRegister);
  }

  void signals(std::size_t n) {
    switch (instructions_[n].signal) {
      case Signal::Breakpoint: fault(n, n, RuleId::Breakpoint); break;
      case Signal::ThreadSwitch:
      case Signal::LastThreadSwitch: fault(n, n, RuleId::ThreadSwitch); break;
      case Signal::WaitScoreboard:
        if (n < 2) fault(n, n, RuleId::ScoreboardStart);
        break;
      default: break;
    }
  }

  void packs(std::size_t n) {
    const Instruction& i = instructions_[n];
    if (i.pack == 0) return;
    if (i.pm && isReservedPmPack(i.pack)) fault(n, n, RuleId::ReservedPack);
    for (const Write& w : accesses_[n]) {
      const bool packed = i.pm ? w.pipe == Pipe::Mul : w.fileA;
      const bool fits = w.address < 32 || (i.pm && !w.isIo());
      if (packed && !fits) fault(n, n, RuleId::PackOnIo);
    }
  }

  void unpacks(std::size_t n) {
    const Instruction& i = instructions_[n];
    if (i.unpack == 0 || i.pm) return;
    const Access& a = accesses_[n];
    if (a.takesA && *a.portA >= 32) fault(n, n, RuleId::UnpackOnIo);
    constexpr std::uint8_t kReplicate = 3;  // this mode has the same effect for floats and integers
    if (i.unpack == kReplicate || i.opAdd == AddOp::Nop || i.opMul == MulOp::Nop) return;
    const bool add = i.addA == Mux::A || (!isUnary(i.opAdd) && i.addB == Mux::A);
    const bool mul = i.mulA == Mux::A || i.mulB == Mux::A;
    if (add && mul && isFloat(i.opAdd) != (i.opMul == MulOp::FMul))
      fault(n, n, RuleId::MixedUnpack);
  }

  void peripherals(std::size_t n) {
    const Instruction& i = instructions_[n];
    const Access& a = accesses_[n];
    const bool semaphore = i.form == Form::Semaphore;
    int used = (semaphore ? 1 : 0) + (a.loadsR4 ? 1 : 0);
    if (a.portA == address::kMutex) ++used;
    if (a.portB == address::kMutex) ++used;
    for (const Write& w : a) {
      const bool counts = isTmu(w.address) || isTlb(w.address) || isSfu(w.address);
      if (counts && semaphore) fault(n, n, RuleId::SemaphoreWrites);
      if (counts && !semaphore) ++used;
    }
    if (used > 1) fault(n, n, RuleId::OnePeripheral);
  }

  // Checks the rules for delay slots and for the end of the program.

  void place(Graph::Node node) {
    const std::size_t n = Graph::instruction(node);
    const Place place = Graph::place(node);
    const bool branches = instructions_[n].form == Form::Branch;
    const Access& a = accesses_[n];
    std::size_t from = n;  // index of the branch or program end
    if (place >= Place::Slot1 && place <= Place::Slot3)
      from = n - static_cast<std::size_t>(place);
    else if (place != Place::Plain)
      from = n - (place == Place::EndSlot1 ? 1 : 2);
    if (place >= Place::Slot1 && place <= Place::Slot3) {
      if (branches) fault(n, from, RuleId::BranchInDelaySlot);
      if (a.ends) fault(n, from, RuleId::BranchNearEnd);
      return;
    }
    if (place == Place::Plain && (!a.ends || branches)) return;
    if (from != n && branches) fault(n, from, RuleId::BranchNearEnd);
    if (a.uniformReads != 0 || a.varyingRead) fault(n, from, RuleId::EndUniform);
    if (a.vpm != 0) fault(n, from, RuleId::EndVpm);
    constexpr std::uint8_t kAddress = 14;
    bool touched = a.portA == kAddress || a.portB == kAddress;
    for (const Write& w : a) {
      touched = touched || w.address == kAddress;
      if (place == Place::EndSlot2 && w.address == kTlbZ) fault(n, from, RuleId::EndTlbZ);
    }
    if (touched) fault(n, from, RuleId::EndAddress14);
  }

  // Checks the rules for instructions that are close to each other on a path.

  void near(const Graph& graph, Graph::Node node) {
    std::vector<Graph::Node> at{node};
    for (std::size_t distance = 1; distance <= kMostDistance; ++distance) {
      std::vector<Graph::Node> before;
      for (const Graph::Node n : at)
        before.insert(before.end(), graph.predecessors(n).begin(), graph.predecessors(n).end());
      std::sort(before.begin(), before.end());
      before.erase(std::unique(before.begin(), before.end()), before.end());
      for (const Graph::Node n : before)
        pair(Graph::instruction(n), Graph::instruction(node), distance);
      at = std::move(before);
    }
  }

  static bool rotates(const Access& a, const Write& w) {
    if (!w.isAccumulator()) return false;
    const unsigned number = w.isR5() ? 5U : w.address - 32U;
    return (a.rotationSources >> number & 1U) != 0;
  }

  // Checks two instructions. `second` executes `distance` instructions after `first`.
  void pair(std::size_t first, std::size_t second, std::size_t distance) {
    const Access& f = accesses_[first];
    const Access& s = accesses_[second];
    const auto report = [&](RuleId rule) { fault(second, first, rule); };
    for (const Write& w : f) {
      if (distance == 1) {
        const bool taken = w.fileA ? s.takesA && s.portA == w.address
                                   : s.takesB && s.portB == w.address;
        if (w.isRegister() && taken) report(RuleId::RegisterFileLatency);
        if (s.rotatesByR5 && w.isR5()) report(RuleId::RotateByR5Latency);
        if (rotates(s, w)) report(RuleId::RotateSourceLatency);
      }
      if (distance <= 2) {
        if (isSfu(w.address)) afterSfu(s, report);
        if (w.address == address::kTmuNoSwap && writes(s, isTmu)) report(RuleId::NoSwapLatency);
        if (w.address == address::kUniformsAddress && s.uniformReads != 0)
          report(RuleId::UniformsAddressLatency);
        if (w.address == kTlbZ && s.portA == kMsFlags) report(RuleId::TlbZLatency);
      }
      if (mayBeReadSetup_[first] && w.address == address::kVpmSetup && (s.vpm & kVpmRead) != 0)
        report(RuleId::VpmReadLatency);
    }
    // A signal that loads r4 has no write address.
    if (distance == 1 && f.loadsR4 && (s.rotationSources & 16U) != 0)
      report(RuleId::RotateSourceLatency);
  }

  template <class Callback>
  static void afterSfu(const Access& s, const Callback& report) {
    if (s.readsR4()) report(RuleId::SfuLatency);
    if (s.loadsR4 || writes(s, isSfu)) report(RuleId::SfuResultWrite);
  }

  template <class Predicate>
  static bool writes(const Access& a, Predicate predicate) {
    return std::any_of(a.begin(), a.end(), [&](const Write& w) { return predicate(w.address); });
  }

  // The rules that depend on the complete path are checked below.

  // Returns true if the state before the node is stored. States are stored only where paths fork
  // or join. The states between these nodes are recomputed.
  static bool storesState(const Graph& graph, Graph::Node node) {
    if (node == graph.reachable().front()) return true;
    const auto& before = graph.predecessors(node);
    return before.size() != 1 || graph.successors(before.front()).size() != 1;
  }

  // Computes the states from a stored state to the next nodes with stored states, and passes the
  // states at these nodes to `arrive`.
  template <class Arrive>
  void walk(const Graph& graph, Graph::Node node, State state, bool reports, Arrive arrive) {
    for (;;) {
      const std::size_t n = Graph::instruction(node);
      std::size_t at = n;
      const auto record = [&](RuleId rule, const std::string& detail) {
        fault(at, at, rule, detail);
      };
      const Report report = reports ? Report(record) : Report();
      step(state, instructions_[n], accesses_[n], twoTmus_, report);
      if (state.wroteReadSetup) mayBeReadSetup_[n] = true;
      if (reports && Graph::place(node) == Place::EndSlot2) {
        at = n - 2;  // index of the program end
        finish(state, report);
      }
      const auto& next = graph.successors(node);
      if (next.size() != 1 || storesState(graph, next.front())) {
        for (const Graph::Node to : next) arrive(to, state);
        return;
      }
      node = next.front();
    }
  }

  void flow(const Graph& graph) {
    if (graph.reachable().empty()) return;
    mayBeReadSetup_.resize(program_.size());
    twoTmus_ = usesTmu(address::kTmu0S) && usesTmu(address::kTmu1S);
    const Graph::Node start = graph.reachable().front();
    std::unordered_map<Graph::Node, State> states{{start, State()}};
    std::vector<bool> queued(graph.nodes());
    std::deque<Graph::Node> queue{start};
    while (!queue.empty()) {
      const Graph::Node node = queue.front();
      queue.pop_front();
      queued[node] = false;
      walk(graph, node, states[node], false, [&](Graph::Node to, const State& state) {
        const auto [entry, first] = states.try_emplace(to, state);
        const bool changed = first || entry->second.join(state);
        if (!changed || queued[to]) return;
        queued[to] = true;
        queue.push_back(to);
      });
    }
    for (const Graph::Node node : graph.reachable()) {
      const auto state = states.find(node);
      if (state != states.end())
        walk(graph, node, state->second, true, [](Graph::Node, const State&) {});
    }
  }

  bool usesTmu(std::uint8_t first) const {
    const auto writesIt = [&](const Access& a) {
      return writes(a, [&](std::uint8_t w) { return w >= first && w < first + 4; });
    };
    return std::any_of(accesses_.begin(), accesses_.end(), writesIt);
  }

  const std::vector<Word>& program_;
  std::vector<Instruction> instructions_;
  std::vector<Access> accesses_;
  bool twoTmus_ = false;
  // True for an instruction that may set up VPM reads. DMA load setups have the same address.
  std::vector<bool> mayBeReadSetup_;
  std::vector<Found> found_;
};

}  // namespace

std::vector<Fault> verify(const std::vector<Word>& program) { return Verifier(program).run(); }

}  // namespace qpu::isa
