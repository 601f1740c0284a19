// Records the constructs of one kernel function as it runs.
#ifndef QPU_SRC_LANG_RECORDER_HPP
#define QPU_SRC_LANG_RECORDER_HPP

#include <string>
#include <vector>

#include "lang/source.hpp"

namespace qpu::detail {

// One recorder at a time is current on a thread; nested compiles stack.
class Recorder {
 public:
  Recorder(std::string name, std::vector<Type> parameters);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();

  // Throws CompileError when no kernel is being traced on this thread.
  static Recorder& current();

  // The recorded kernel; throws CompileError when a block is still open, and again what
  // was thrown while it recorded: a kernel that caught that is not whole.
  Source finish();

  // Number of the expression; throws CompileError when it is of another trace.
  std::uint32_t use(Node n);
  Node make(Expression e);
  Node variable(Type type);
  Node parameter(std::size_t position) const;
  const Expression& expression(std::uint32_t id) const { return source_.expressions[id]; }

  // The place of a construct that is no statement, for errors.
  Site site(const char* construct, Location where);
  // Append a statement to the innermost open block.
  Statement& add(StatementKind kind, const char* construct, Location where);
  void begin(StatementKind kind, const char* construct, Node condition, Location where);
  void beginBody();
  void beginElse(Location where);
  void end(Location where);

  [[noreturn]] void fail(const Site& site, const std::string& what);
  // For what is wrong with an expression, which is no statement of its own.
  [[noreturn]] void failHere(const char* construct, Location where, const std::string& what);
  void refuseInWhere(const Site& site, const char* why);
  void requireOutermost(const Site& site, const char* why);
  void requireRange(const Site& site, const char* what, int value, int low, int high);

  // Elements left out between two of a vector, for what is recorded next.
  int readStride = 0;
  int writeStride = 0;

 private:
  enum class Part : std::uint8_t { Body, Else, Step };
  struct Open {
    Statement statement;
    Part part;
  };

  // What went wrong first.
  struct Failure {
    std::string text;
    const char* construct = nullptr;
  };

  [[noreturn]] void raiseFailure() const;
  std::vector<Statement>& block();
  Source source_;
  std::uint32_t serial_;
  std::vector<Open> open_;
  Site last_;
  Recorder* outer_;
  Failure failure_;
};

}  // namespace qpu::detail

#endif
