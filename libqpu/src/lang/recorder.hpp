// Records the constructs of one kernel function while it runs.
#ifndef QPU_SRC_LANG_RECORDER_HPP
#define QPU_SRC_LANG_RECORDER_HPP

#include <string>
#include <vector>

#include "lang/source.hpp"

namespace qpu::detail {

// Each thread has one current recorder. Nested calls of compile() form a stack.
class Recorder {
 public:
  Recorder(std::string name, std::vector<Type> parameters);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();

  // Throws CompileError if no kernel is being recorded on this thread.
  static Recorder& current();

  // Returns the recorded kernel. Throws CompileError if a block is still open. Throws the
  // first error again if the kernel function caught it, because the record is incomplete.
  Source finish();

  // Returns the expression's number. Throws CompileError if the expression belongs to another
  // trace.
  std::uint32_t use(Node n);
  Node make(Expression e);
  Node variable(Type type);
  Node parameter(std::size_t position) const;
  const Expression& expression(std::uint32_t id) const { return source_.expressions[id]; }

  // Creates a site for a construct that is not a statement, for errors.
  Site site(const char* construct, Location where);
  // Appends a statement to the innermost open block.
  Statement& add(StatementKind kind, const char* construct, Location where);
  void begin(StatementKind kind, const char* construct, Node condition, Location where);
  void beginBody();
  void beginElse(Location where);
  void end(Location where);

  [[noreturn]] void fail(const Site& site, const std::string& what);
  // Reports an error in an expression, which is not a separate statement.
  [[noreturn]] void failHere(const char* construct, Location where, const std::string& what);
  void refuseInWhere(const Site& site, const char* why);
  void requireOutermost(const Site& site, const char* why);
  void requireRange(const Site& site, const char* what, int value, int low, int high);

  // Sets the number of elements that later statements skip between two elements of a vector.
  int readStride = 0;
  int writeStride = 0;

 private:
  enum class Part : std::uint8_t { Body, Else, Step };
  struct Open {
    Statement statement;
    Part part;
  };

  // The first error.
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
