// Adds two arrays. The first version is simple. The speed of the last version is limited by the
// bus.
#ifndef TUTORIAL_ADD_HPP
#define TUTORIAL_ADD_HPP

#include <array>

#include "QPULib.h"

namespace tutorial {

// Each QPU processes 16 numbers at a time, and waits for every load and every store. n must be a
// multiple of 16.
inline void addWaiting(Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b) {
  For (Int i = me() << 4, i < n, i = i + (numQPUs() << 4))
    out[i] = a[i] + b[i];
  End
}

// Each QPU requests the next 16 numbers before it receives the current ones, and it does not wait
// for stores. Each QPU issues one more request than necessary. `last` keeps the addresses of this
// request inside the arrays.
inline void addAhead(Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b) {
  Int step = numQPUs() << 4;
  Int last = n - 16;
  Int i = me() << 4;
  If (i < n)
    gather(a + i + index());
    gather(b + i + index());
    While (i < n)
      Int next = min(i + step, last);
      gather(a + next + index());
      gather(b + next + index());
      Float x, y;
      receive(x);
      receive(y);
      store(x + y, out + i);
      i = i + step;
    End
    Float unused;
    receive(unused);
    receive(unused);
  End
}

// Each QPU processes four vectors at a time, has eight requests in flight, and stores the four
// results from its own VPM rows with one DMA transfer. The remaining elements are processed as
// single vectors. The last vector may be incomplete, so n can be any number.
inline void addBursts(Int n, Ptr<Float> out, Ptr<Float> a, Ptr<Float> b) {
  Int blocks = n >> 6;
  Int step = numQPUs() << 6;
  Int vpmRow = me() << 2;
  If (me() < blocks)
    Ptr<Float> p = a + (me() << 6) + index();
    Ptr<Float> q = b + (me() << 6) + index();
    for (int j = 0; j < 4; ++j) {
      gather(p + 16 * j);
      gather(q + 16 * j);
    }
    For (Int block = me(), block < blocks, block = block + numQPUs())
      // Advance if there is another block for this QPU; otherwise, request the same block again.
      Int onward = step & ((block + numQPUs() - blocks) >> 31);
      p = p + onward;
      q = q + onward;
      std::array<Float, 4> sum;
      for (int j = 0; j < 4; ++j) {
        Float x, y;
        receive(x);
        receive(y);
        gather(p + 16 * j);
        gather(q + 16 * j);
        sum[static_cast<std::size_t>(j)] = x + y;
      }
      dmaWaitWrite();  // waits for the transfer of the previous block
      vpmSetupWrite(HORIZ, vpmRow);
      for (const Float& s : sum) vpmPut(s);
      dmaSetWriteStride(0);
      dmaSetupWrite(HORIZ, 4, vpmRow << 4);
      dmaStartWrite(out + (block << 6));
    End
    Float unused;
    for (int j = 0; j < 8; ++j) receive(unused);
    dmaWaitWrite();
  End
  Int whole = blocks << 6;
  For (Int i = whole + (me() << 4), i < n, i = i + (numQPUs() << 4))
    Int count = min(n - i, 16);
    Int lane = i + min(index(), count - 1);
    gather(a + lane);
    gather(b + lane);
    Float x, y;
    receive(x);
    receive(y);
    store(x + y, out + i, count);
  End
}

}  // namespace tutorial

#endif
