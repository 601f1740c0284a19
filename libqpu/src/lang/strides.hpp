// Loads and stores with a stride, composed of loads and stores without one.
#ifndef QPU_SRC_LANG_STRIDES_HPP
#define QPU_SRC_LANG_STRIDES_HPP

#include "qpu/detail/builder.h"

namespace qpu::detail {

// `stride`: number of elements to skip between two elements, at least 1.
Node loadWithStride(Node address, Type type, int stride);
void storeWithStride(Node value, Node address, bool wait, int stride, Location where);

}  // namespace qpu::detail

#endif
