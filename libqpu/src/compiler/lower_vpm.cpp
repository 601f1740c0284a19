#include "compiler/lower_vpm.hpp"

#include <algorithm>

namespace qpu::compiler {
namespace {

using detail::Source;
using detail::Statement;
using detail::StatementKind;

class VpmAnalysis {
 public:
  explicit VpmAnalysis(const Source& source) : source_(source) {
    std::uint32_t last = 0;
    countSites(source.body, last);
    result_.needs.resize(last + 1);
    result_.unread.resize(last + 1, false);
  }

  VpmByHand run() {
    (void)before(source_.body, {});
    (void)after(source_.body, 0);
    return std::move(result_);
  }

 private:
  static constexpr int kUnknown = -1;

  static void countSites(const std::vector<Statement>& statements, std::uint32_t& last) {
    for (const Statement& s : statements) {
      last = std::max(last, s.site.number);
      countSites(s.body, last);
      countSites(s.other, last);
    }
  }

  // --- setups that are needed later: backward analysis ---

  VpmNeeds before(const std::vector<Statement>& statements, VpmNeeds needs) {
    for (auto s = statements.rbegin(); s != statements.rend(); ++s) needs = before(*s, needs);
    return needs;
  }

  VpmNeeds before(const Statement& s, VpmNeeds needs) {
    VpmNeeds& here = result_.needs[s.site.number];
    here.add(needs);
    switch (s.kind) {
      case StatementKind::VpmWrite: needs.writeWindow = true; break;
      case StatementKind::VpmWriteSetup: needs.writeWindow = false; break;
      case StatementKind::DmaWriteStart: needs.storeSetup = true; break;
      case StatementKind::DmaWriteSetup: needs.storeSetup = false; break;
      case StatementKind::DmaReadStart: needs.loadSetup = true; break;
      case StatementKind::DmaReadSetup: needs.loadSetup = false; break;
      case StatementKind::If: {
        VpmNeeds no = before(s.other, needs);
        needs = before(s.body, needs);
        needs.add(no);
        break;
      }
      case StatementKind::Where: needs = before(s.body, before(s.other, needs)); break;
      case StatementKind::While:
      case StatementKind::For:
        for (;;) {
          VpmNeeds next = before(s.body, before(s.other, needs));
          next.add(needs);
          if (next == needs) break;
          needs = next;
        }
        here.add(needs);  // the condition is also evaluated after the body
        break;
      default: break;
    }
    // A load in the statement precedes the statement's own uses of the setups.
    here.add(needs);
    return needs;
  }

  // --- vectors that are still unread: forward analysis ---

  int take(std::uint32_t expression, int unread) const {
    if (expression == detail::kNoExpression || unread == kUnknown) return unread;
    return std::max(0, unread - source_.expressions[expression].vpmReads);
  }

  int after(const std::vector<Statement>& statements, int unread) {
    for (const Statement& s : statements) unread = after(s, unread);
    return unread;
  }

  int after(const Statement& s, int unread) {
    if (unread != 0) result_.unread[s.site.number] = true;
    const auto join = [](int a, int b) { return a == b ? a : kUnknown; };
    switch (s.kind) {
      case StatementKind::Store:
        return take(s.limit, take(s.address, take(s.value, unread)));
      case StatementKind::Assign:
      case StatementKind::PrintVector:
      case StatementKind::DmaReadPitch:
      case StatementKind::DmaWriteStride:
      case StatementKind::VpmWrite: return take(s.value, unread);
      case StatementKind::Gather:
      case StatementKind::DmaReadSetup:
      case StatementKind::DmaReadStart:
      case StatementKind::DmaWriteSetup:
      case StatementKind::DmaWriteStart:
      case StatementKind::VpmWriteSetup: return take(s.address, unread);
      case StatementKind::VpmReadSetup: return s.count;
      case StatementKind::If: {
        unread = take(s.value, unread);
        return join(after(s.body, unread), after(s.other, unread));
      }
      case StatementKind::Where: return after(s.other, after(s.body, take(s.value, unread)));
      case StatementKind::While:
      case StatementKind::For:
        unread = take(s.value, unread);
        for (;;) {
          const int next = take(s.value, after(s.other, after(s.body, unread)));
          const int both = join(unread, next);
          if (both == unread) return unread;
          unread = both;
          result_.unread[s.site.number] = true;
        }
      default: return unread;
    }
  }

  const Source& source_;
  VpmByHand result_;
};

}  // namespace

VpmByHand analyseVpm(const Source& source) { return VpmAnalysis(source).run(); }

}  // namespace qpu::compiler
