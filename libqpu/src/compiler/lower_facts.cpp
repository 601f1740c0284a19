#include "compiler/lower_facts.hpp"

namespace qpu::compiler {
namespace {

using detail::Expression;
using detail::Source;
using detail::Statement;
using detail::StatementKind;

// Collects the facts about the statements, and marks the expressions that the statements use.
void collect(const std::vector<Statement>& statements, KernelFacts& facts, std::vector<char>& used) {
  const auto use = [&used](std::uint32_t expression) {
    if (expression != detail::kNoExpression) used[expression] = 1;
  };
  for (const Statement& s : statements) {
    use(s.value);
    use(s.address);
    use(s.limit);
    switch (s.kind) {
      case StatementKind::Store: facts.stores = true; break;
      case StatementKind::Gather: facts.gathers = true; break;
      case StatementKind::SemaphoreAcquire:
      case StatementKind::SemaphoreRelease:
        facts.semaphores.set(static_cast<std::size_t>(s.count));
        break;
      case StatementKind::DmaWriteStart:
        facts.stores = facts.vpmByHand = true;
        break;
      case StatementKind::DmaReadPitch:
      case StatementKind::DmaReadSetup:
      case StatementKind::DmaReadStart:
      case StatementKind::DmaReadWait:
      case StatementKind::DmaWriteStride:
      case StatementKind::DmaWriteSetup:
      case StatementKind::DmaWriteWait:
      case StatementKind::VpmReadSetup:
      case StatementKind::VpmWriteSetup:
      case StatementKind::VpmWrite: facts.vpmByHand = true; break;
      default: break;
    }
    collect(s.body, facts, used);
    collect(s.other, facts, used);
  }
}

// Ignores loads whose results are unused, because `*p = x` records `*p` as a load.
bool hasLoad(const Source& source, std::vector<char>& used) {
  for (std::size_t i = source.expressions.size(); i-- > 0;) {
    if (used[i] == 0) continue;
    const Expression& e = source.expressions[i];
    if (e.op == detail::Op::Load) return true;
    used[e.a] = used[e.b] = 1;  // if e is a leaf, e.a and e.b are 0; expression 0 is also a leaf
  }
  return false;
}

}  // namespace

KernelFacts findFacts(const Source& source) {
  KernelFacts facts;
  std::vector<char> used(source.expressions.size() + 1, 0);
  collect(source.body, facts, used);
  facts.loads = hasLoad(source, used);
  return facts;
}

Summariser::Summariser(const Source& source, bool countsGathers)
    : variables_(static_cast<std::uint32_t>(source.variables.size())), countsGathers_(countsGathers),
      assignedIn_(source.variables.size() + static_cast<std::size_t>(Hidden::Count), 0) {}

Summary Summariser::summarise(const Statement& s) {
  ++summaries_;
  Summary summary;
  add(s.body, summary);
  add(s.other, summary);
  return summary;
}

void Summariser::assign(Summary& summary, std::uint32_t variable) {
  if (assignedIn_[variable] == summaries_) return;
  assignedIn_[variable] = summaries_;
  summary.assigned.push_back(variable);
}

void Summariser::add(const std::vector<Statement>& statements, Summary& summary) {
  for (const Statement& s : statements) {
    switch (s.kind) {
      case StatementKind::Assign: assign(summary, s.target); break;
      case StatementKind::Receive:
        assign(summary, s.target);
        if (countsGathers_) assign(summary, hidden(Hidden::Outstanding));
        break;
      case StatementKind::Gather:
        if (countsGathers_) assign(summary, hidden(Hidden::Outstanding));
        break;
      case StatementKind::VpmWrite:
      case StatementKind::VpmWriteSetup: assign(summary, hidden(Hidden::HandWriteWindow)); break;
      case StatementKind::DmaWriteSetup: assign(summary, hidden(Hidden::HandStoreSetup)); break;
      case StatementKind::DmaReadSetup: assign(summary, hidden(Hidden::HandLoadSetup)); break;
      case StatementKind::Store:
        summary.stores = true;
        summary.waitsForStore = summary.waitsForStore || s.wait;
        assign(summary, hidden(Hidden::StoreSetup));
        assign(summary, hidden(Hidden::WriteWindow));
        break;
      case StatementKind::DmaWriteStart: summary.stores = true; break;
      case StatementKind::SemaphoreAcquire: summary.acquires = true; break;
      default: break;
    }
    add(s.body, summary);
    add(s.other, summary);
  }
}

}  // namespace qpu::compiler
