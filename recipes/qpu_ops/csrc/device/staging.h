// Copies for the CPU, which are used when the CPU must not work in QPU memory. Only the part that
// a tensor covers is copied, not the whole storage that the tensor views. Each copy is counted as
// "staged to cpu" or "staged to qpu".
#ifndef TORCH_QPU_STAGING_H
#define TORCH_QPU_STAGING_H

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace torch_qpu {

// A range of bytes in a storage.
struct Extent {
  std::size_t first = 0;
  std::size_t end = 0;

  void include(const Extent& other);
};
// Returns the range from a tensor's first element to its last element.
Extent extent_of(const at::Tensor& t);

// Returns a CPU storage that contains the bytes in `extent` of a device storage. Byte 0 of the CPU
// storage is byte staged_from(extent) of the device storage.
c10::Storage staged(const c10::Storage& storage, const Extent& extent);
std::size_t staged_from(const Extent& extent);

// Returns true if a tensor's elements are sparse in the range that they span. For such tensors, it
// is faster to copy runs of elements one by one.
bool is_spread(const at::Tensor& t);
// Returns a dense CPU tensor that contains the elements of `t`. The order of the dimensions is
// preserved.
at::Tensor gathered(const at::Tensor& t);

// Copies the elements back to the tensor from the memory that staged() or gathered() returned.
void unstage(const at::Tensor& t, const at::Tensor& cpu);

}  // namespace torch_qpu

#endif
