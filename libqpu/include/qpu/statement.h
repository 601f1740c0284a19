// Statements of the language: control flow and memory access.
#ifndef QPU_STATEMENT_H
#define QPU_STATEMENT_H

#include "qpu/condition.h"
#include "qpu/vector.h"

namespace qpu {

// Control flow without macros; qpu/macros.h wraps these. Each of If_, While_,
// For_ and Where_ is closed by one End_.
inline void If_(const Cond& c, Location where = QPU_HERE) { detail::beginIf(c.node(), where); }
inline void While_(const Cond& c, Location where = QPU_HERE) {
  detail::beginWhile(c.node(), where);
}
// Statements between For_ and ForBody_ are the step; they run after the body.
inline void For_(const Cond& c, Location where = QPU_HERE) { detail::beginFor(c.node(), where); }
inline void ForBody_() { detail::beginForBody(); }
// Assignments inside change only the elements where `mask` holds. Where blocks
// nest; loads read all 16 words, stores and loops are refused.
inline void Where_(const BoolExpr& mask, Location where = QPU_HERE) {
  detail::beginWhere(mask.node(), where);
}
inline void Else_(Location where = QPU_HERE) { detail::beginElse(where); }
inline void End_(Location where = QPU_HERE) { detail::end(where); }

// Ask for the word at each of the 16 addresses of p, without waiting. The low
// two bits of an address are ignored. At most 8 requests may be outstanding
// where gathers and receives alternate between the two TMUs in a way that no
// branch or loop disturbs: the paths that meet at a point have as many
// outstanding, and loops ask an even number of times. Else, or when *p is read
// while some are outstanding, at most 4.
template <typename T>
void gather(const PtrExpr<T>& p, Location where = QPU_HERE) {
  detail::gather(p.node(), detail::Element<T>::type(), where);
}

// Take the oldest gathered vector.
inline void receive(Int& x, Location where = QPU_HERE) { detail::receive(x.node(), where); }
inline void receive(Float& x, Location where = QPU_HERE) { detail::receive(x.node(), where); }
template <typename T>
void receive(Ptr<T>& x, Location where = QPU_HERE) {
  detail::receive(x.node(), where);
}

// Store 16 consecutive words at the first address of p, without waiting; a
// following store waits for it.
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

// Store the first n words, 1..16, of x only: what follows them in memory keeps
// its values. n's element 0 counts.
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

// In the loads *p and p[i], and in the stores *p = x, p[i] = x and store(x, p), that follow
// in the text of the kernel, leave out `elements` (0..2047, at first 0) elements of memory
// between two of the vector: with 1, *p is every other word. A C++ number, outside of If,
// While, For and Where. gather() and DMA by hand take no stride, store(x, p, n) is refused
// under one. Slower than without: a load takes up to 16 loads and 16 rotations, a store 16
// stores of a word; for arrays that are walked, gather(p + index() * 2) is better.
//
// QPULib's programs use these; its documents do not define them. The count is that of
// dmaSetWriteStride(), from the end of one piece to the start of the next, in elements.
inline void setReadStride(int elements, Location where = QPU_HERE) {
  detail::readStride(elements, where);
}
inline void setWriteStride(int elements, Location where = QPU_HERE) {
  detail::writeStride(elements, where);
}

// Print from a kernel: text as it is, a vector as <e0,e1,..,e15> and a newline.
// Goes to standard output; nothing on backends that cannot print.
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

// The 16 semaphores 0..15 are shared by all QPUs, count 0..15 and are 0 when a
// kernel starts; a kernel must leave them at 0. semaInc waits at 15, semaDec at 0.
inline void semaInc(int semaphore, Location where = QPU_HERE) {
  detail::semaphoreRelease(semaphore, where);
}
inline void semaDec(int semaphore, Location where = QPU_HERE) {
  detail::semaphoreAcquire(semaphore, where);
}

}  // namespace qpu

#endif
