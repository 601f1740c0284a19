// Follows the queue of outstanding gathers along every path of a kernel. The
// state is the set of queues that some path may have led to; a statement that
// no queue of the set allows can only fail. Queues differ by the types of their
// entries, so there are at most 3^0 + .. + 3^4 of them and loops settle.
#include <set>
#include <string>

#include "error_facts.hpp"
#include "lang/source.hpp"

namespace qpu::detail {
namespace {

constexpr std::size_t kMaxOutstanding = 4;  // manual: measured limit of the TMU, see docs

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

class Walk {
 public:
  explicit Walk(const Source& source) : source_(source) {}

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
      if (q.size() < kMaxOutstanding) next.insert(q + letter(s.element));
    if (next.empty() && !queues.empty())
      fail(s, "4 gathers are outstanding already; receive one before the next gather");
    return next;
  }

  Queues receive(const Statement& s, const Queues& queues) const {
    const char wanted = letter(source_.variables[s.target]);
    Queues next;
    char other = 0;
    for (const Queue& q : queues) {
      if (q.empty()) continue;
      if (q[0] == wanted)
        next.insert(q.substr(1));
      else
        other = q[0];
    }
    if (!next.empty() || queues.empty()) return next;
    if (other == 0) fail(s, "no gather is outstanding");
    fail(s, std::string("the oldest gather delivers ") + word(other) + ", the variable is " +
                word(wanted));
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
};

}  // namespace

void checkGathers(const Source& source) { (void)Walk(source).block(source.body, {Queue()}); }

}  // namespace qpu::detail
