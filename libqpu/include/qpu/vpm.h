// Direct access to the VPM and its two DMA engines. The VPM is a window of 64 rows by 16 columns of
// 32-bit words. All QPUs share the VPM, so use separate rows for each QPU, or order the accesses
// with semaphores. Manual: section 7, VPM and VCD/VDW.
//
// A DMA address in the VPM is a word number: 16 * row + column. The address of a HORIZ vector is
// its row (0..63). The address of a VERT vector is 16 * (row / 16) + column.
//
// In a kernel that uses any of these functions, row 63 - me() is reserved. The compiler uses this
// row for store(), for `*p = x`, and to read *p if a store may precede the read. The compiler never
// uses rows 0 to 51, and it does not change the kernel's windows or setups.
#ifndef QPU_VPM_H
#define QPU_VPM_H

#include "qpu/statement.h"

namespace qpu {

// HORIZ places a memory row or a vector along a VPM row, and VERT places it along a VPM column.
enum VPMDirection { HORIZ, VERT };

namespace detail {
inline Direction direction(VPMDirection d) {
  return d == HORIZ ? Direction::Horizontal : Direction::Vertical;
}
}  // namespace detail

// Sets the distance in bytes (0..8191) from the start of one memory row to the start of the next.
inline void dmaSetReadPitch(const IntExpr& bytes, Location where = QPU_HERE) {
  detail::dmaReadPitch(bytes.node(), where);
}
// Sets up a DMA read of numRows (1..16) memory rows with rowLength (1..16) words each. In the VPM,
// each memory row starts vpmPitch (1..16) VPM rows after the previous one, for both HORIZ and VERT.
// VERT with rowLength 1 therefore fills a single column with one word from each memory row, and
// VERT with vpmPitch 16 places the columns one below the other. Source: Broadcom's guide, VPITCH of
// the DMA load setup.
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

// Sets the distance in bytes (0..8191) from the END of one memory row to the start of the next.
inline void dmaSetWriteStride(const IntExpr& bytes, Location where = QPU_HERE) {
  detail::dmaWriteStride(bytes.node(), where);
}
// Sets up a DMA write of numRows (HORIZ: 1..64, VERT: 1..16) memory rows with rowLength (HORIZ:
// 1..16, VERT: 1..64) words each. Each memory row comes from the VPM row (HORIZ) or column (VERT)
// that follows the source of the previous memory row.
inline void dmaSetupWrite(VPMDirection d, int numRows, const IntExpr& vpmAddress,
                          int rowLength = 16, Location where = QPU_HERE) {
  detail::dmaWriteSetup(detail::direction(d), numRows, vpmAddress.node(), rowLength, where);
}
template <typename T>
void dmaStartWrite(const PtrExpr<T>& memory, Location where = QPU_HERE) {
  detail::dmaWriteStart(memory.node(), where);
}
inline void dmaWaitWrite(Location where = QPU_HERE) { detail::dmaWriteWait(where); }

// Sets up the VPM so that the kernel can read `vectors` (1..16) vectors. The first vector is at
// `address`, and the addresses of consecutive vectors are `stride` (1..64) apart. The kernel must
// read all these vectors before the next setup.
inline void vpmSetupRead(VPMDirection d, int vectors, const IntExpr& address, int stride = 1,
                         Location where = QPU_HERE) {
  detail::vpmReadSetup(detail::direction(d), vectors, address.node(), stride, where);
}
// Return an expression that reads the next vector from the VPM each time it is evaluated. Operands
// are evaluated from left to right. An expression can read at most 64 vectors.
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
