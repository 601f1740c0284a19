// Loads and stores of vectors whose elements are apart in memory, made of others.
#ifndef QPU_SRC_LANG_STRIDES_HPP
#define QPU_SRC_LANG_STRIDES_HPP

#include "qpu/detail/builder.h"

namespace qpu::detail {

// `stride`: elements left out between two, 1 or more.
Node loadWithStride(Node address, Type type, int stride);
void storeWithStride(Node value, Node address, bool wait, int stride, Location where);

}  // namespace qpu::detail

#endif
