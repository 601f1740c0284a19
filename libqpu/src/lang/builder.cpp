// Records the operators and statements of a kernel.
#include "qpu/detail/builder.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <string>

#include "lang/fold.hpp"
#include "lang/recorder.hpp"
#include "lang/strides.hpp"

namespace qpu::detail {
namespace {

Node constant(Type type, std::uint32_t bits) {
  Expression e{Op::Constant, type, 0};
  e.bits = bits;
  return Recorder::current().make(e);
}

// The interpreter and the compiler visit operands recursively. In a debug build, this limit needs several MB of stack.
constexpr int kMostDepth = 10'000;

Node operation(Expression e, int depthOfOperands) {
  Recorder& r = Recorder::current();
  e.depth = depthOfOperands + 1;
  if (e.depth > kMostDepth)
    r.failHere("expression", Location(),
               "more than " + std::to_string(kMostDepth) +
                   " operations are nested in an expression; assign parts of the expression to variables");
  return r.make(e);
}

// The size of the VPM window, and the maximum distance in bytes between memory rows.
constexpr int kVpmRows = 64, kVpmColumns = 16;
constexpr int kMaxPitch = 8191;

// Checks an address or a distance that is a C++ number. An invalid number is an error even if the
// statement is never executed, because the hardware does not define a setup word for it.
void requireConstant(const Statement& s, const char* what, std::uint32_t expression, int high) {
  Recorder& r = Recorder::current();
  const Expression& e = r.expression(expression);
  if (e.op == Op::Constant)
    r.requireRange(s.site, what, static_cast<std::int32_t>(e.bits), 0, high);
}

// Checks that a DMA setup with a constant address accesses only words in the VPM. In a load, each
// memory row starts s.pitch VPM rows after the previous one. In a store along columns, each
// memory row comes from the next column.
void requireInWindow(const Statement& s) {
  Recorder& r = Recorder::current();
  const Expression& e = r.expression(s.address);
  if (e.op != Op::Constant) return;
  requireConstant(s, "the VPM address", s.address, kVpmRows * kVpmColumns - 1);
  const bool horizontal = s.direction == Direction::Horizontal;
  const bool sideways = !horizontal && s.kind == StatementKind::DmaWriteSetup;
  const int rows = (sideways ? 0 : (s.count - 1) * s.pitch) + (horizontal ? 1 : s.length);
  const int columns = sideways ? s.count : horizontal ? s.length : 1;
  const auto address = static_cast<int>(e.bits);
  if (address / kVpmColumns + rows > kVpmRows || address % kVpmColumns + columns > kVpmColumns)
    r.fail(s.site, std::to_string(rows) + " rows by " + std::to_string(columns) +
                       " columns from VPM word " + std::to_string(address) +
                       " exceed the window of 64 rows by 16 columns");
}

constexpr const char* kAssignment = "assignment";
constexpr const char* kStoreAssignment = "*p = ...";

}  // namespace

Node constantInt(std::int32_t value) {
  return constant(Type::Int, static_cast<std::uint32_t>(value));
}

Node constantIntOf(double value) {
  // In C++, converting a value outside this range is undefined. The condition also rejects NaN.
  if (!(value > -2147483649.0 && value < 4294967296.0)) {
    std::array<char, 32> text{};
    (void)std::snprintf(text.data(), text.size(), "%.10g", value);
    Recorder::current().failHere("Int", Location(),
                                 std::string("the number ") + text.data() +
                                     " does not fit into an Int, whose range is -2147483648..4294967295");
  }
  return constantInt(value < 0 ? static_cast<std::int32_t>(value)
                               : static_cast<std::int32_t>(static_cast<std::uint32_t>(value)));
}

Node constantFloat(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return constant(Type::Float, bits);
}

Node leaf(Op op, Type type) {
  return Recorder::current().make({op, type, op == Op::VpmRead ? 1 : 0});
}

Node unary(Op op, Type type, Node a) {
  Recorder& r = Recorder::current();
  const Expression& operand = r.expression(r.use(a));
  if (op == Op::Not && operand.op == Op::Constant) return constant(type, ~operand.bits);
  Expression e{op, type, operand.vpmReads};
  e.a = r.use(a);
  return operation(e, operand.depth);
}

Node binary(Op op, Type type, Node a, Node b) {
  Recorder& r = Recorder::current();
  const Expression& left = r.expression(r.use(a));
  const Expression& right = r.expression(r.use(b));
  std::uint32_t folded = 0;
  if (left.op == Op::Constant && right.op == Op::Constant &&
      foldInt(op, left.bits, right.bits, folded))
    return constant(type, folded);
  Expression e{op, type, left.vpmReads + right.vpmReads};
  if (e.vpmReads > kVpmRows)
    r.failHere("vpmGet", Location(),
               "an expression reads " + std::to_string(e.vpmReads) + " vectors, but the VPM has " +
                   std::to_string(kVpmRows) +
                   "; every use of an expression reads its vectors again; to read them only once, "
                   "assign the expression to a variable");
  e.a = a.id;
  e.b = b.id;
  return operation(e, std::max(left.depth, right.depth));
}

Node broadcast(Type type, Node a, int element, Location where) {
  Recorder& r = Recorder::current();
  if (element < 0 || element > 15)
    r.failHere("broadcast", where,
               "the element is " + std::to_string(element) + ", but must be 0..15");
  return binary(Op::Broadcast, type, a, constantInt(element));
}

Node load(Node address, Type type) {
  const int stride = Recorder::current().readStride;
  return stride == 0 ? unary(Op::Load, type, address) : loadWithStride(address, type, stride);
}

Node declare(Type type, Location /*where*/) { return Recorder::current().variable(type); }

Node parameter(std::size_t position) { return Recorder::current().parameter(position); }

void assign(Node variable, Node value, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(StatementKind::Assign, kAssignment, where);
  s.target = r.expression(r.use(variable)).bits;
  s.value = r.use(value);
}

void store(Node value, Node address, bool wait, Location where) {
  Recorder& r = Recorder::current();
  if (r.writeStride != 0) return storeWithStride(value, address, wait, r.writeStride, where);
  Statement& s = r.add(StatementKind::Store, wait ? kStoreAssignment : "store", where);
  r.refuseInWhere(s.site,
                  "a store writes all 16 words; load the old values, use select(), and store after End");
  s.value = r.use(value);
  s.address = r.use(address);
  s.wait = wait;
}

void storeFirst(Node value, Node address, Node words, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(StatementKind::Store, "store", where);
  r.refuseInWhere(s.site,
                  "a store writes consecutive words; load the old values, use select(), and store "
                  "after End");
  if (r.writeStride != 0)
    r.fail(s.site, "not allowed with a stride; call setWriteStride(0) before this store");
  s.value = r.use(value);
  s.address = r.use(address);
  s.limit = r.use(words);
  const Expression& limit = r.expression(s.limit);
  if (limit.op == Op::Constant)
    r.requireRange(s.site, "the number of words", static_cast<int>(limit.bits), 1, 16);
}

void gather(Node address, Type element, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(StatementKind::Gather, "gather", where);
  r.refuseInWhere(s.site, "it requests all 16 elements");
  s.address = r.use(address);
  s.element = element;
}

void receive(Node variable, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(StatementKind::Receive, "receive", where);
  s.target = r.expression(r.use(variable)).bits;
}

void beginIf(Node condition, Location where) {
  Recorder::current().begin(StatementKind::If, "If", condition, where);
}
void beginWhile(Node condition, Location where) {
  Recorder::current().begin(StatementKind::While, "While", condition, where);
}
void beginFor(Node condition, Location where) {
  Recorder::current().begin(StatementKind::For, "For", condition, where);
}
void beginForBody() { Recorder::current().beginBody(); }
void beginWhere(Node mask, Location where) {
  Recorder::current().begin(StatementKind::Where, "Where", mask, where);
}
void beginElse(Location where) { Recorder::current().beginElse(where); }
void end(Location where) { Recorder::current().end(where); }

void printText(const char* text, Location where) {
  Statement& s = Recorder::current().add(StatementKind::PrintText, "Print", where);
  s.text = text != nullptr ? text : "";
}

void printVector(Node value, Type type, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(StatementKind::PrintVector, "Print", where);
  s.value = r.use(value);
  s.element = type;
}

namespace {

void semaphore(StatementKind kind, const char* construct, int number, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(kind, construct, where);
  r.requireRange(s.site, "the semaphore", number, 0, 15);
  s.count = number;
}

void distance(StatementKind kind, const char* construct, Node bytes, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(kind, construct, where);
  s.value = r.use(bytes);
  requireConstant(s, "the distance in bytes", s.value, kMaxPitch);
}

void withAddress(StatementKind kind, const char* construct, Node address, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(kind, construct, where);
  s.address = r.use(address);
}

}  // namespace

void semaphoreRelease(int number, Location where) {
  semaphore(StatementKind::SemaphoreRelease, "semaInc", number, where);
}
void semaphoreAcquire(int number, Location where) {
  semaphore(StatementKind::SemaphoreAcquire, "semaDec", number, where);
}

void dmaReadPitch(Node bytes, Location where) {
  distance(StatementKind::DmaReadPitch, "dmaSetReadPitch", bytes, where);
}

void dmaReadSetup(Direction direction, int rows, Node address, int rowLength, int vpmPitch,
                  Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(StatementKind::DmaReadSetup, "dmaSetupRead", where);
  r.requireRange(s.site, "the number of rows", rows, 1, 16);
  r.requireRange(s.site, "the row length", rowLength, 1, 16);
  r.requireRange(s.site, "the VPM pitch", vpmPitch, 1, 16);
  s.direction = direction;
  s.count = rows;
  s.length = rowLength;
  s.pitch = vpmPitch;
  s.address = r.use(address);
  requireInWindow(s);
}

void dmaReadStart(Node address, Location where) {
  withAddress(StatementKind::DmaReadStart, "dmaStartRead", address, where);
}
void dmaReadWait(Location where) {
  Recorder::current().add(StatementKind::DmaReadWait, "dmaWaitRead", where);
}
void dmaWriteStride(Node bytes, Location where) {
  distance(StatementKind::DmaWriteStride, "dmaSetWriteStride", bytes, where);
}

void dmaWriteSetup(Direction direction, int rows, Node address, int rowLength, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(StatementKind::DmaWriteSetup, "dmaSetupWrite", where);
  const bool horizontal = direction == Direction::Horizontal;
  r.requireRange(s.site, "the number of rows", rows, 1, horizontal ? 64 : 16);
  r.requireRange(s.site, "the row length", rowLength, 1, horizontal ? 16 : 64);
  s.direction = direction;
  s.count = rows;
  s.length = rowLength;
  s.pitch = 1;
  s.address = r.use(address);
  requireInWindow(s);
}

void dmaWriteStart(Node address, Location where) {
  withAddress(StatementKind::DmaWriteStart, "dmaStartWrite", address, where);
}
void dmaWriteWait(Location where) {
  Recorder::current().add(StatementKind::DmaWriteWait, "dmaWaitWrite", where);
}

void vpmReadSetup(Direction direction, int vectors, Node address, int stride, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(StatementKind::VpmReadSetup, "vpmSetupRead", where);
  r.requireRange(s.site, "the number of vectors", vectors, 1, 16);
  r.requireRange(s.site, "the stride", stride, 1, 64);
  s.direction = direction;
  s.count = vectors;
  s.pitch = stride;
  s.address = r.use(address);
  requireConstant(s, "the vector address", s.address, kVpmRows - 1);
}

void vpmWriteSetup(Direction direction, Node address, int stride, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(StatementKind::VpmWriteSetup, "vpmSetupWrite", where);
  r.requireRange(s.site, "the stride", stride, 1, 64);
  s.direction = direction;
  s.pitch = stride;
  s.address = r.use(address);
  requireConstant(s, "the vector address", s.address, kVpmRows - 1);
}

void vpmWrite(Node value, Location where) {
  Recorder& r = Recorder::current();
  Statement& s = r.add(StatementKind::VpmWrite, "vpmPut", where);
  r.refuseInWhere(s.site, "it writes all 16 elements");
  s.value = r.use(value);
}

}  // namespace qpu::detail
