// Direct access to the VPM and its two DMA engines. The VPM is a window of 64 rows by
// 16 columns of 32-bit words that all QPUs share: use separate rows for each QPU, or
// order their accesses with semaphores. Manual: section 7, VPM and VCD/VDW.
//
// A DMA address in the VPM counts words: 16 * row + column. A HORIZ vector address counts rows
// (0..63); a VERT one is 16 * (row / 16) + column.
//
// In a kernel that uses any of these functions, store() and *p = x place their vectors in row 63
// - me(), as does a read of *p that a store can precede. The compiler never uses rows 0 to 51,
// and leaves windows and setups unchanged.
#ifndef QPU_VPM_H
#define QPU_VPM_H

#include "qpu/statement.h"

namespace qpu {

// HORIZ: a memory row or a vector lies along a VPM row; VERT: along a column.
enum VPMDirection { HORIZ, VERT };

namespace detail {
inline Direction direction(VPMDirection d) {
  return d == HORIZ ? Direction::Horizontal : Direction::Vertical;
}
}  // namespace detail

// Distance in bytes from the start of one memory row to the start of the next,
// 0..8191.
inline void dmaSetReadPitch(const IntExpr& bytes, Location where = QPU_HERE) {
  detail::dmaReadPitch(bytes.node(), where);
}
// Reads numRows (1..16) memory rows of rowLength (1..16) words. Each row starts vpmPitch (1..16)
// VPM rows after the previous one, for both HORIZ and VERT. VERT with rowLength 1 therefore fills
// one column with words from the memory rows, and VERT with vpmPitch 16 places columns below each
// other. Source: Broadcom's guide, VPITCH of the DMA load setup.
inline void dmaSetupRead(VPMDirection d, int numRows, const IntExpr& vpmAddress,
                         int rowLength = 16, int vpmPitch = 1, Location where = QPU_HERE) {
  detail::dmaReadSetup(detail::direction(d), numRows, vpmAddress.node(), rowLength, vpmPitch,
                       where);
}
template <typename T>
void dmaStartRead(const PtrExpr<T>& memory, Location where = QPU_HERE) {
  detail::dmaReadStart(memory.node(), where);
}
inline void dmaWaitRead(Location where = QPU_HERE) { detail::dmaReadWait(where); }

// Distance in bytes from the END of one memory row to the start of the next,
// 0..8191.
inline void dmaSetWriteStride(const IntExpr& bytes, Location where = QPU_HERE) {
  detail::dmaWriteStride(bytes.node(), where);
}
// Writes numRows (1..64 HORIZ, 1..16 VERT) memory rows of rowLength words (1..16 HORIZ, 1..64
// VERT). Each memory row comes from the VPM row (HORIZ) or column (VERT) after that of the
// previous one.
inline void dmaSetupWrite(VPMDirection d, int numRows, const IntExpr& vpmAddress,
                          int rowLength = 16, Location where = QPU_HERE) {
  detail::dmaWriteSetup(detail::direction(d), numRows, vpmAddress.node(), rowLength, where);
}
template <typename T>
void dmaStartWrite(const PtrExpr<T>& memory, Location where = QPU_HERE) {
  detail::dmaWriteStart(memory.node(), where);
}
inline void dmaWaitWrite(Location where = QPU_HERE) { detail::dmaWriteWait(where); }

// Sets up reading of `vectors` (1..16) vectors, from `address` in steps of `stride`
// (1..64). All of them must be read before the next setup.
inline void vpmSetupRead(VPMDirection d, int vectors, const IntExpr& address, int stride = 1,
                         Location where = QPU_HERE) {
  detail::vpmReadSetup(detail::direction(d), vectors, address.node(), stride, where);
}
// Reads the next vector whenever the expression is evaluated. Operands are evaluated from left to
// right.
inline IntExpr vpmGetInt() {
  return IntExpr(detail::FromNode(detail::leaf(detail::Op::VpmRead, detail::Type::Int)));
}
inline FloatExpr vpmGetFloat() {
  return FloatExpr(detail::FromNode(detail::leaf(detail::Op::VpmRead, detail::Type::Float)));
}

inline void vpmSetupWrite(VPMDirection d, const IntExpr& address, int stride = 1,
                          Location where = QPU_HERE) {
  detail::vpmWriteSetup(detail::direction(d), address.node(), stride, where);
}
inline void vpmPut(const IntExpr& x, Location where = QPU_HERE) {
  detail::vpmWrite(x.node(), where);
}
inline void vpmPut(const FloatExpr& x, Location where = QPU_HERE) {
  detail::vpmWrite(x.node(), where);
}
template <typename A, typename detail::IfInteger<A>::type = 0>
void vpmPut(A x, Location where = QPU_HERE) {
  detail::vpmWrite(IntExpr(x).node(), where);
}
template <typename A, typename detail::IfReal<A>::type = 0>
void vpmPut(A x, Location where = QPU_HERE) {
  detail::vpmWrite(FloatExpr(x).node(), where);
}

}  // namespace qpu

#endif
