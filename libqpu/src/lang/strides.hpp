// Loads and stores with a stride, which consist of loads and stores without a stride.
#ifndef QPU_SRC_LANG_STRIDES_HPP
#define QPU_SRC_LANG_STRIDES_HPP

#include "qpu/detail/builder.h"

namespace qpu::detail {

// `stride` is the number of elements in memory (at least 1) to skip between two elements.
Node loadWithStride(Node address, Type type, int stride);
void storeWithStride(Node value, Node address, bool wait, int stride, Location where);

}  // namespace qpu::detail

#endif
