// First examples of memory access: a store, and loads that are requested in advance.
#ifndef TUTORIAL_MEMORY_HPP
#define TUTORIAL_MEMORY_HPP

#include "QPULib.h"

namespace tutorial {

// Each QPU writes 16 numbers. A number identifies the QPU and the element: 100 * QPU + element.
inline void hello(Ptr<Int> p) { p[me() << 4] = me() * 100 + index(); }

// Keeps two requests in flight. The vectors are received in the order of the requests.
inline void reqRecv(Ptr<Int> p) {
  Ptr<Int> mine = p + index();
  gather(mine);
  gather(mine + 16);
  Int first, second;
  receive(first);
  receive(second);
  store(first + second, p + 32);
  store(second - first, p + 48);
}

}  // namespace tutorial

#endif
