// Copies for the CPU when it must not work in QPU memory: only the part that a tensor covers
// is copied, not the whole storage that it views. Each copy is counted as "staged to cpu" or
// "staged to qpu".
#ifndef TORCH_QPU_STAGING_H
#define TORCH_QPU_STAGING_H

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace torch_qpu {

// A range of bytes of a storage.
struct Extent {
  std::size_t first = 0;
  std::size_t end = 0;

  void include(const Extent& other);
};
// The range from a tensor's first element to its last.
Extent extent_of(const at::Tensor& t);

// A CPU storage with these bytes of a device storage. Its byte 0 is byte
// staged_from(extent) of the device storage.
c10::Storage staged(const c10::Storage& storage, const Extent& extent);
std::size_t staged_from(const Extent& extent);

// Whether a tensor's elements are sparse in the range that they span, so that copying the runs
// one by one is faster.
bool is_spread(const at::Tensor& t);
// A dense CPU tensor with the elements of such a tensor, its dimensions in the same order.
at::Tensor gathered(const at::Tensor& t);

// Copies the elements from staged() or gathered() memory back to the tensor.
void unstage(const at::Tensor& t, const at::Tensor& cpu);

}  // namespace torch_qpu

#endif
