// Copies for the CPU where it must not work in the QPUs' memory: of what a tensor covers,
// not of the whole storage that it is a view of. Each is counted, as "staged to cpu" and
// "staged to qpu".
#ifndef TORCH_QPU_STAGING_H
#define TORCH_QPU_STAGING_H

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace torch_qpu {

// Bytes of a storage.
struct Extent {
  std::size_t first = 0;
  std::size_t end = 0;

  void include(const Extent& other);
};
// From a tensor's first element to its last.
Extent extent_of(const at::Tensor& t);

// A CPU storage with these bytes of a storage of the device. Its byte 0 is byte
// staged_from(extent) of that one.
c10::Storage staged(const c10::Storage& storage, const Extent& extent);
std::size_t staged_from(const Extent& extent);

// Whether a tensor's elements are few in what they span, so that they are better copied one
// run after the other.
bool is_spread(const at::Tensor& t);
// A dense CPU tensor with the elements of such a tensor, its dimensions in the same order.
at::Tensor gathered(const at::Tensor& t);

// Brings the elements of staged() or gathered() memory back to the tensor.
void unstage(const at::Tensor& t, const at::Tensor& cpu);

}  // namespace torch_qpu

#endif
