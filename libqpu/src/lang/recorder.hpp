// Records the constructs of a kernel function while the function runs.
#ifndef QPU_SRC_LANG_RECORDER_HPP
#define QPU_SRC_LANG_RECORDER_HPP

#include <string>
#include <vector>

#include "lang/source.hpp"

namespace qpu::detail {

// Each thread has a current recorder. Nested calls of compile() form a stack of recorders.
class Recorder {
 public:
  Recorder(std::string name, std::vector<Type> parameters);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();

  // Throws CompileError if no kernel is being recorded on this thread.
  static Recorder& current();

  // Returns the recorded kernel. Throws CompileError if a block is still open. If the kernel
  // function caught an earlier error, the record is incomplete, and finish() throws the first
  // error again.
  Source finish();

  // Returns the number of the expression. Throws CompileError if the expression belongs to
  // another trace.
  std::uint32_t use(Node n);
  Node make(Expression e);
  Node variable(Type type);
  Node parameter(std::size_t position) const;
  const Expression& expression(std::uint32_t id) const { return source_.expressions[id]; }

  // Creates a site for errors in a construct that is not a statement.
  Site site(const char* construct, Location where);
  // Appends a statement to the innermost open block.
  Statement& add(StatementKind kind, const char* construct, Location where);
  void begin(StatementKind kind, const char* construct, Node condition, Location where);
  void beginBody();
  void beginElse(Location where);
  void end(Location where);

  [[noreturn]] void fail(const Site& site, const std::string& what);
  // Reports an error in an expression that is not part of a recorded statement.
  [[noreturn]] void failHere(const char* construct, Location where, const std::string& what);
  void refuseInWhere(const Site& site, const char* why);
  void requireOutermost(const Site& site, const char* why);
  void requireRange(const Site& site, const char* what, int value, int low, int high);

  // The number of elements in memory that later loads or stores skip between two elements of a
  // vector.
  int readStride = 0;
  int writeStride = 0;

 private:
  enum class Part : std::uint8_t { Body, Else, Step };
  struct Open {
    Statement statement;
    Part part;
  };

  // The first error that was reported.
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
