// Tracks the queue of outstanding gathers along every path through a kernel. The state of the
// analysis is the set of queues that are possible. A statement is reported as an error if it is
// invalid for every queue in the set. Queues differ in the types of their entries. There are at
// most 3^0 + .. + 3^8 different queues, so the analysis of loops terminates.
#include "lang/gathers.hpp"

#include <set>
#include <string>

#include "error_facts.hpp"

namespace qpu::detail {
namespace {

using Queue = std::string;
using Queues = std::set<Queue>;

char letter(Type t) {
  switch (t) {
    case Type::Float: return 'F';
    case Type::Address: return 'P';
    default: return 'I';
  }
}

const char* word(char letter) {
  switch (letter) {
    case 'F': return "Float";
    case 'P': return "Ptr";
    default: return "Int";
  }
}

class QueueChecker {
 public:
  QueueChecker(const Source& source, std::size_t most) : source_(source), most_(most) {}

  Queues block(const std::vector<Statement>& statements, Queues queues) const {
    for (const Statement& s : statements) queues = step(s, std::move(queues));
    return queues;
  }

 private:
  [[noreturn]] void fail(const Statement& s, const std::string& what) const {
    raise<CompileError>(
        "kernel '" + source_.name + "': " + source_.describe(s.site) + ": " + what,
        {source_.name, s.site.construct, -1, 0});
  }

  Queues gather(const Statement& s, const Queues& queues) const {
    Queues next;
    for (const Queue& q : queues)
      if (q.size() < most_) next.insert(q + letter(s.element));
    if (next.empty() && !queues.empty())
      fail(s, std::to_string(most_) +
                  " gathers are already outstanding; receive one before the next gather");
    return next;
  }

  Queues receive(const Statement& s, const Queues& queues) const {
    const char expected = letter(source_.variables[s.target]);
    Queues next;
    char other = 0;
    for (const Queue& q : queues) {
      if (q.empty()) continue;
      if (q[0] == expected)
        next.insert(q.substr(1));
      else
        other = q[0];
    }
    if (!next.empty() || queues.empty()) return next;
    if (other == 0) fail(s, "no gather is outstanding");
    fail(s, std::string("the oldest gather delivers ") + word(other) + ", but the variable is " +
                word(expected));
  }

  Queues loop(const Statement& s, Queues queues) const {
    for (;;) {
      Queues again = block(s.other, block(s.body, queues));
      const std::size_t before = queues.size();
      queues.insert(again.begin(), again.end());
      if (queues.size() == before) return queues;
    }
  }

  Queues step(const Statement& s, Queues queues) const {
    switch (s.kind) {
      case StatementKind::Gather: return gather(s, queues);
      case StatementKind::Receive: return receive(s, queues);
      case StatementKind::If: {
        Queues taken = block(s.body, queues);
        const Queues other = block(s.other, std::move(queues));
        taken.insert(other.begin(), other.end());
        return taken;
      }
      case StatementKind::Where: return block(s.other, block(s.body, std::move(queues)));
      case StatementKind::While:
      case StatementKind::For: return loop(s, std::move(queues));
      default: return queues;
    }
  }

  const Source& source_;
  const std::size_t most_;
};

// Tracks the number of outstanding gathers, and the position of the next gather in the pattern.
// The pattern starts again when no gather is outstanding.
class Pattern {
 public:
  // Request k of the pattern goes to TMU k mod 2, where k = 0 .. period - 1.
  Pattern(const std::vector<bool>& loads, int period) : loads_(loads), period_(period) {
    plan_.usesBothTmus = period > 1;
    if (period == 2) plan_.most = 2 * kTmuDepth;
  }

  bool fits(const std::vector<Statement>& body) {
    const State end = block(body, {0, 0});
    plan_.endIsKnown = end.outstanding != kUnknown;
    for (int i = 0; i < end.outstanding; ++i)
      plan_.left.push_back(unit(end.next - end.outstanding + i));
    // If the number of outstanding gathers at the end is known only at run time, all gathers must
    // use the same TMU.
    return fits_ && (plan_.endIsKnown || period_ == 1);
  }

  GatherPlan take() { return std::move(plan_); }

 private:
  static constexpr int kUnknown = -1;

  struct State {
    int outstanding = 0;
    int next = 0;
    bool operator!=(const State& o) const {
      return outstanding != o.outstanding || next != o.next;
    }
  };

  static State join(const State& a, const State& b) {
    State s = a;
    if (a.outstanding != b.outstanding) s.outstanding = kUnknown;
    if (a.next != b.next || s.outstanding == kUnknown) s.next = kUnknown;
    return s;
  }

  std::uint8_t unit(int place) const {
    return static_cast<std::uint8_t>((place % period_ + period_) % period_ % 2);
  }

  void record(const Statement& s, int place) {
    if (plan_.units.size() <= s.site.number) plan_.units.resize(s.site.number + 1, 0);
    plan_.units[s.site.number] = unit(place);
  }

  bool hasLoad(const Statement& s) const {
    const auto in = [this](std::uint32_t e) { return e < loads_.size() && loads_[e]; };
    switch (s.kind) {
      case StatementKind::Store: return in(s.value) || in(s.address) || in(s.limit);
      case StatementKind::Gather:
      case StatementKind::DmaReadSetup:
      case StatementKind::DmaReadStart:
      case StatementKind::DmaWriteSetup:
      case StatementKind::DmaWriteStart:
      case StatementKind::VpmReadSetup:
      case StatementKind::VpmWriteSetup: return in(s.address);
      case StatementKind::Assign:
      case StatementKind::If:
      case StatementKind::While:
      case StatementKind::For:
      case StatementKind::Where:
      case StatementKind::DmaReadPitch:
      case StatementKind::DmaWriteStride:
      case StatementKind::VpmWrite: return in(s.value);
      default: return false;
    }
  }

  // A load cannot use the same TMU as gathers that are outstanding.
  void load(const Statement& s, const State& state) {
    if (state.outstanding != 0 && hasLoad(s)) fits_ = false;
  }

  State block(const std::vector<Statement>& statements, State state) {
    for (const Statement& s : statements) state = step(s, state);
    return state;
  }

  State step(const Statement& s, State state) {
    load(s, state);
    switch (s.kind) {
      case StatementKind::Gather:
        if (state.next == kUnknown) fits_ = false;
        record(s, state.next);
        if (state.outstanding != kUnknown) ++state.outstanding;
        if (state.next != kUnknown) state.next = (state.next + 1) % period_;
        return state;
      case StatementKind::Receive:
        if (state.next == kUnknown || state.outstanding == kUnknown) fits_ = false;
        record(s, state.next - state.outstanding);
        if (state.outstanding > 0) --state.outstanding;
        if (state.outstanding == 0) state.next = 0;
        return state;
      case StatementKind::If: {
        const State taken = block(s.body, state);
        return join(taken, block(s.other, state));
      }
      case StatementKind::Where: return block(s.other, block(s.body, state));
      case StatementKind::While:
      case StatementKind::For:
        for (;;) {
          const State again = block(s.other, block(s.body, state));
          load(s, again);
          const State head = join(state, again);
          if (!(head != state)) return state;
          state = head;
        }
      default: return state;
    }
  }

  const std::vector<bool>& loads_;
  const int period_;
  GatherPlan plan_;
  bool fits_ = true;
};

// Determines which expressions read memory.
std::vector<bool> findLoads(const Source& source) {
  std::vector<bool> loads(source.expressions.size(), false);
  for (std::size_t i = 0; i < loads.size(); ++i) {
    const Expression& e = source.expressions[i];
    // The operands of a leaf are not used.
    const bool leaf = e.op <= Op::VpmRead;
    loads[i] = e.op == Op::Load || (!leaf && (loads[e.a] || loads[e.b]));
  }
  return loads;
}

}  // namespace

// Chooses the pattern. If requests simply alternate between the TMUs, a loop with an odd number of
// gathers executes the same gather on a different TMU in each iteration. Longer patterns support
// these loops, but they allow no more outstanding gathers than a single TMU.
GatherPlan planGathers(const Source& source) {
  const std::vector<bool> loads = findLoads(source);
  for (const int period : {2, 3, 5, 7}) {
    Pattern pattern(loads, period);
    if (pattern.fits(source.body)) return pattern.take();
  }
  Pattern one(loads, 1);
  (void)one.fits(source.body);
  return one.take();
}

void checkGathers(const Source& source) {
  (void)QueueChecker(source, planGathers(source).most).block(source.body, {Queue()});
}

}  // namespace qpu::detail
