// The statements of the kernel language: control flow and memory access.
#ifndef QPU_STATEMENT_H
#define QPU_STATEMENT_H

#include "qpu/condition.h"
#include "qpu/vector.h"

namespace qpu {

// Control flow without macros. The macros in qpu/macros.h call these functions. Each If_, While_,
// For_ and Where_ must be closed with End_.
inline void If_(const Cond& c, Location where = QPU_HERE) { detail::beginIf(c.node(), where); }
inline void While_(const Cond& c, Location where = QPU_HERE) {
  detail::beginWhile(c.node(), where);
}
// The statements between For_ and ForBody_ are the loop's step. The step runs after the body.
inline void For_(const Cond& c, Location where = QPU_HERE) { detail::beginFor(c.node(), where); }
inline void ForBody_() { detail::beginForBody(); }
// An assignment inside a Where block changes only the elements where `mask` holds. Where blocks
// can be nested. A load in a Where block still reads all 16 words. Stores and loops are not
// allowed in a Where block.
inline void Where_(const BoolExpr& mask, Location where = QPU_HERE) {
  detail::beginWhere(mask.node(), where);
}
inline void Else_(Location where = QPU_HERE) { detail::beginElse(where); }
inline void End_(Location where = QPU_HERE) { detail::end(where); }

// Requests the word at each of the 16 addresses in p, and does not wait for these words. The low
// two bits of an address are ignored. At most 4 requests can be outstanding. The limit is 8 if two
// conditions are met: the kernel does not read *p while requests are outstanding, and the compiler
// can make gathers and receives alternate between the two TMUs. The second condition requires that
// the number of outstanding requests at each point in the kernel is the same on all paths, and that
// each loop iteration issues an even number of requests.
template <typename T>
void gather(const PtrExpr<T>& p, Location where = QPU_HERE) {
  detail::gather(p.node(), detail::Element<T>::type(), where);
}

// Receives the vector that the oldest outstanding gather() requested.
inline void receive(Int& x, Location where = QPU_HERE) { detail::receive(x.node(), where); }
inline void receive(Float& x, Location where = QPU_HERE) { detail::receive(x.node(), where); }
template <typename T>
void receive(Ptr<T>& x, Location where = QPU_HERE) {
  detail::receive(x.node(), where);
}

// Stores 16 consecutive words, starting at the first address in p, and does not wait until the
// words are written. Any later store waits until this store is complete.
inline void store(const IntExpr& x, const PtrExpr<Int>& p, Location where = QPU_HERE) {
  detail::store(x.node(), p.node(), false, where);
}
inline void store(const FloatExpr& x, const PtrExpr<Float>& p, Location where = QPU_HERE) {
  detail::store(x.node(), p.node(), false, where);
}
template <typename T>
void store(const PtrExpr<T>& x, const PtrExpr<Ptr<T> >& p, Location where = QPU_HERE) {
  detail::store(x.node(), p.node(), false, where);
}

// Stores only the first n (1..16) words of x. The words that follow in memory keep their values.
// Only element 0 of n is used.
inline void store(const IntExpr& x, const PtrExpr<Int>& p, const IntExpr& n,
                  Location where = QPU_HERE) {
  detail::storeFirst(x.node(), p.node(), n.node(), where);
}
inline void store(const FloatExpr& x, const PtrExpr<Float>& p, const IntExpr& n,
                  Location where = QPU_HERE) {
  detail::storeFirst(x.node(), p.node(), n.node(), where);
}
template <typename T>
void store(const PtrExpr<T>& x, const PtrExpr<Ptr<T> >& p, const IntExpr& n,
           Location where = QPU_HERE) {
  detail::storeFirst(x.node(), p.node(), n.node(), where);
}

// Sets the stride of the loads (*p and p[i]) or the stores (*p = x, p[i] = x and store(x, p)) that
// follow in the kernel's source. The stride is the number of elements in memory (0..2047, initially
// 0) that are skipped between two elements of the vector. With a stride of 1, *p reads every other
// word. The stride is a C++ number and must be set outside If, While, For and Where. A stride does
// not apply to gather() or explicit DMA. While a stride is set, store(x, p, n) is an error. Strides
// are slow: a load becomes up to 16 loads and 16 rotations, and a store becomes 16 one-word stores.
// To iterate over an array, gather(p + index() * 2) is faster.
//
// Programs for QPULib use these functions, but QPULib's documentation does not define the
// functions' behaviour. In libqpu, the stride is the distance from the end of one element to the
// start of the next, as in dmaSetWriteStride(), but measured in elements.
inline void setReadStride(int elements, Location where = QPU_HERE) {
  detail::readStride(elements, where);
}
inline void setWriteStride(int elements, Location where = QPU_HERE) {
  detail::writeStride(elements, where);
}

// Prints to standard output while a kernel runs. Text is printed unchanged. A vector is printed
// as <e0,e1,..,e15>, followed by a newline. Backends that cannot print ignore the statement.
inline void Print(const char* text, Location where = QPU_HERE) { detail::printText(text, where); }
inline void Print(const IntExpr& x, Location where = QPU_HERE) {
  detail::printVector(x.node(), detail::Type::Int, where);
}
inline void Print(const FloatExpr& x, Location where = QPU_HERE) {
  detail::printVector(x.node(), detail::Type::Float, where);
}
template <typename A, typename detail::IfInteger<A>::type = 0>
void Print(A x, Location where = QPU_HERE) {
  detail::printVector(IntExpr(x).node(), detail::Type::Int, where);
}
template <typename A, typename detail::IfReal<A>::type = 0>
void Print(A x, Location where = QPU_HERE) {
  detail::printVector(FloatExpr(x).node(), detail::Type::Float, where);
}
template <typename T>
void Print(const PtrExpr<T>& x, Location where = QPU_HERE) {
  detail::printVector(x.node(), detail::Type::Address, where);
}

// All QPUs share the semaphores 0..15. Each semaphore counts from 0 to 15. A semaphore is 0 when a
// kernel starts, and must be 0 again when the kernel ends. semaInc waits while the value is 15, and
// semaDec waits while the value is 0.
inline void semaInc(int semaphore, Location where = QPU_HERE) {
  detail::semaphoreRelease(semaphore, where);
}
inline void semaDec(int semaphore, Location where = QPU_HERE) {
  detail::semaphoreAcquire(semaphore, where);
}

}  // namespace qpu

#endif
