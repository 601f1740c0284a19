// A recorded kernel before any lowering. Every backend starts from it.
#ifndef QPU_SRC_LANG_SOURCE_HPP
#define QPU_SRC_LANG_SOURCE_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "qpu/detail/builder.h"

namespace qpu::detail {

// Expressions form a graph. Operands have smaller numbers than their users.
struct Expression {
  Op op;
  Type type;
  bool readsVpm;  // each evaluation reads the next vector
  std::uint32_t a = 0;
  std::uint32_t b = 0;
  std::uint32_t bits = 0;  // value of a Constant, number of a Variable
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

// A statement's position, for error messages.
struct Site {
  const char* construct = "";  // a string literal
  std::uint32_t number = 0;    // number of the statement in the kernel, from 1
  std::uint32_t file = 0;      // into Source::files
  int line = 0;
  bool exact = false;  // if false, the statement is after file:line
};

constexpr std::uint32_t kNoExpression = UINT32_MAX;

struct Statement {
  StatementKind kind;
  Site site;
  std::uint32_t target = 0;  // variable
  std::uint32_t value = 0;   // expression: value, condition or mask
  std::uint32_t address = 0; // expression
  // Store: the expression for the number of words to store (1..16) from element 0 on. By default
  // all 16.
  std::uint32_t limit = kNoExpression;
  Type element = Type::Int;
  bool wait = false;
  Direction direction = Direction::Horizontal;
  int count = 0;   // rows, vectors, or the number of the semaphore
  int length = 0;  // words of a row
  int pitch = 0;
  std::string text;
  std::vector<Statement> body;
  std::vector<Statement> other;  // Else part; step of For
};

struct Source {
  std::string name;
  std::vector<Type> parameters;  // parameter i is variable i
  std::vector<Type> variables;
  std::vector<Expression> expressions;
  std::vector<std::string> files;
  std::vector<Statement> body;

  // "store at rot3d.cpp:12" or "*p = ... (statement 7, after rot3d.cpp:12)".
  std::string describe(const Site& site) const;
};

// Throws CompileError for errors on every path: a receive without a gather, too many
// outstanding gathers, or a received type that differs from the gathered type.
void checkGathers(const Source& source);

}  // namespace qpu::detail

#endif
