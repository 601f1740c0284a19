// A recorded kernel before it is lowered. Every backend starts from this form.
#ifndef QPU_SRC_LANG_SOURCE_HPP
#define QPU_SRC_LANG_SOURCE_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "qpu/detail/builder.h"

namespace qpu::detail {

// Returns true if the operation is not a leaf and uses both operands of its expression.
bool isBinary(Op op);

// Expressions form a graph. An operand has a smaller number than the expressions that use it.
struct Expression {
  Op op;
  Type type;
  int vpmReads;  // number of vectors that each evaluation reads from the VPM
  std::uint32_t a = 0;
  std::uint32_t b = 0;
  std::uint32_t bits = 0;  // value of a Constant, or number of a Variable
  int depth = 0;           // number of operations on the longest path to a leaf
};

enum class StatementKind : std::uint8_t {
  Assign, Store, Gather, Receive,
  If, While, For, Where,
  PrintText, PrintVector,
  SemaphoreRelease, SemaphoreAcquire,
  DmaReadPitch, DmaReadSetup, DmaReadStart, DmaReadWait,
  DmaWriteStride, DmaWriteSetup, DmaWriteStart, DmaWriteWait,
  VpmReadSetup, VpmWriteSetup, VpmWrite
};

// The position of a statement in the source, for error messages.
struct Site {
  const char* construct = "";  // name of the construct; a string literal
  std::uint32_t number = 0;    // number of the statement in the kernel, counted from 1
  std::uint32_t file = 0;      // index into Source::files
  int line = 0;
  bool exact = false;  // if false, the statement follows file:line at an unknown distance
};

constexpr std::uint32_t kNoExpression = UINT32_MAX;

struct Statement {
  StatementKind kind;
  Site site;
  std::uint32_t target = 0;  // number of a variable
  std::uint32_t value = 0;   // number of an expression: a value, a condition or a mask
  std::uint32_t address = 0; // number of an expression
  // For Store: the expression for the number of words (1..16) to store, starting with element 0.
  // By default, all 16 words are stored.
  std::uint32_t limit = kNoExpression;
  Type element = Type::Int;
  bool wait = false;
  Direction direction = Direction::Horizontal;
  int count = 0;   // number of rows or vectors, or the semaphore's number
  int length = 0;  // number of words in a row
  int pitch = 0;
  std::string text;
  std::vector<Statement> body;
  std::vector<Statement> other;  // the Else part, or the step of a For loop
};

struct Source {
  std::string name;
  std::vector<Type> parameters;  // parameter i is also variable i
  std::vector<Type> variables;
  std::vector<Expression> expressions;
  std::vector<std::string> files;
  std::vector<Statement> body;

  // Returns text such as "store at rot3d.cpp:12" or "*p = ... (statement 7, after rot3d.cpp:12)".
  std::string describe(const Site& site) const;
};

// Throws CompileError if one of these errors occurs on every path to a statement: a receive without
// a gather, too many outstanding gathers, or a received type that differs from the gathered type.
void checkGathers(const Source& source);

}  // namespace qpu::detail

#endif
