#include "lang/recorder.hpp"

#include <atomic>
#include <utility>

#include "error_facts.hpp"

namespace qpu::detail {
namespace {

thread_local Recorder* currentRecorder = nullptr;

std::uint32_t nextSerial() {
  static std::atomic<std::uint32_t> last{0};
  return ++last;
}

}  // namespace

Recorder::Recorder(std::string name, std::vector<Type> parameters)
    : serial_(nextSerial()), outer_(currentRecorder) {
  source_.name = std::move(name);
  source_.parameters = std::move(parameters);
  for (const Type t : source_.parameters) (void)variable(t);
  currentRecorder = this;
}

Recorder::~Recorder() { currentRecorder = outer_; }

Recorder& Recorder::current() {
  if (currentRecorder == nullptr)
    raise<CompileError>(
        "Int, Float, Ptr and the statements of the language work only inside a function that "
        "compile() runs",
        {"", "vector", -1, 0});
  return *currentRecorder;
}

Source Recorder::finish() {
  if (failure_.construct != nullptr) raiseFailure();
  if (!open_.empty()) fail(open_.back().statement.site, "has no End");
  return std::move(source_);
}

std::uint32_t Recorder::use(Node n) {
  if (n.trace == serial_) return n.id;
  failure_ = {"kernel '" + source_.name +
                  "': a vector of another kernel is used; a vector is valid only while its own "
                  "kernel is recorded",
              "vector"};
  raiseFailure();
}

Node Recorder::make(Expression e) {
  source_.expressions.push_back(e);
  return {serial_, static_cast<std::uint32_t>(source_.expressions.size() - 1)};
}

Node Recorder::variable(Type type) {
  Expression e{Op::Variable, type, 0};
  e.bits = static_cast<std::uint32_t>(source_.variables.size());
  source_.variables.push_back(type);
  return make(e);
}

// The constructor creates the parameters' expressions first, so the position of a parameter is also
// the number of its expression.
Node Recorder::parameter(std::size_t position) const {
  return {serial_, static_cast<std::uint32_t>(position)};
}

std::vector<Statement>& Recorder::block() {
  if (open_.empty()) return source_.body;
  Open& o = open_.back();
  return o.part == Part::Body ? o.statement.body : o.statement.other;
}

Site Recorder::site(const char* construct, Location where) {
  if (where.file != nullptr) {
    if (source_.files.empty() || source_.files[last_.file] != where.file) {
      last_.file = static_cast<std::uint32_t>(source_.files.size());
      source_.files.emplace_back(where.file);
    }
    last_.line = where.line;
  }
  last_.construct = construct;
  last_.exact = where.file != nullptr;
  ++last_.number;
  return last_;
}

Statement& Recorder::add(StatementKind kind, const char* construct, Location where) {
  Statement s{};
  s.kind = kind;
  s.site = site(construct, where);
  std::vector<Statement>& to = block();
  to.push_back(std::move(s));
  return to.back();
}

void Recorder::begin(StatementKind kind, const char* construct, Node condition, Location where) {
  Open o{};
  o.statement.kind = kind;
  o.statement.site = site(construct, where);
  if (kind == StatementKind::While || kind == StatementKind::For)
    refuseInWhere(o.statement.site,
                  "elements outside the mask keep their values, so the loop might never end");
  o.statement.value = use(condition);
  o.part = kind == StatementKind::For ? Part::Step : Part::Body;
  open_.push_back(std::move(o));
}

void Recorder::beginBody() {
  if (open_.empty() || open_.back().statement.kind != StatementKind::For ||
      open_.back().part != Part::Step)
    fail(site("ForBody_", Location()), "there is no open For that still needs a body");
  open_.back().part = Part::Body;
}

void Recorder::beginElse(Location where) {
  const Site here = site("Else", where);
  if (open_.empty()) fail(here, "no If or Where is open");
  Open& o = open_.back();
  if (o.statement.kind != StatementKind::If && o.statement.kind != StatementKind::Where)
    fail(here, "belongs to " + source_.describe(o.statement.site) +
                   "; only If and Where can have an Else");
  if (o.part == Part::Else)
    fail(here, source_.describe(o.statement.site) + " already has an Else");
  o.part = Part::Else;
}

void Recorder::end(Location where) {
  const Site here = site("End", where);
  if (open_.empty()) fail(here, "no If, While, For or Where is open");
  if (open_.back().part == Part::Step)
    fail(here, source_.describe(open_.back().statement.site) + " has no body");
  Statement done = std::move(open_.back().statement);
  open_.pop_back();
  block().push_back(std::move(done));
}

void Recorder::fail(const Site& site, const std::string& what) {
  failure_ = {"kernel '" + source_.name + "': " + source_.describe(site) + ": " + what,
              site.construct};
  raiseFailure();
}

void Recorder::raiseFailure() const {
  raise<CompileError>(failure_.text, {source_.name, failure_.construct, -1, 0});
}

void Recorder::failHere(const char* construct, Location where, const std::string& what) {
  fail(site(construct, where), what);
}

void Recorder::refuseInWhere(const Site& site, const char* why) {
  for (const Open& o : open_)
    if (o.statement.kind == StatementKind::Where)
      fail(site, std::string("not allowed inside Where: ") + why);
}

void Recorder::requireOutermost(const Site& site, const char* why) {
  if (!open_.empty())
    fail(site, "not allowed inside " + source_.describe(open_.back().statement.site) + ": " + why);
}

void Recorder::requireRange(const Site& site, const char* what, int value, int low, int high) {
  if (value < low || value > high)
    fail(site, std::string(what) + " is " + std::to_string(value) + ", but must be " +
                   std::to_string(low) + ".." + std::to_string(high));
}

}  // namespace qpu::detail
