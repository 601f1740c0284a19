#include "staging.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "memory.h"
#include "trace.h"

namespace torch_qpu {
namespace {

using at::Tensor;

// The elements of every dtype are aligned to their size, which is at most kMaxItem bytes.
constexpr std::size_t kMaxItem = 16;

std::size_t rounded_up(std::size_t bytes) { return (bytes + 3) / 4 * 4; }

char* start_of(const c10::Storage& storage) {
  return static_cast<char*>(const_cast<void*>(storage.data()));
}

// Returns the dimensions that have more than one element, in order of decreasing stride.
std::vector<std::int64_t> by_stride(const Tensor& t) {
  std::vector<std::int64_t> dims;
  for (std::int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1) dims.push_back(d);
  std::stable_sort(dims.begin(), dims.end(),
                   [&t](std::int64_t a, std::int64_t b) { return t.stride(a) > t.stride(b); });
  return dims;
}

// Calls body(place, length) for each run of consecutive elements, in the order in which a dense
// tensor with the same dimension order would store them. Both arguments are in units of elements,
// not bytes.
template <typename Body>
void over_runs(const Tensor& t, Body body) {
  std::vector<std::int64_t> dims = by_stride(t);
  std::int64_t length = 1;
  while (!dims.empty() && t.stride(dims.back()) == length) {
    length *= t.size(dims.back());
    dims.pop_back();
  }
  std::vector<std::int64_t> at(dims.size(), 0);
  std::int64_t place = t.storage_offset();
  for (;;) {
    body(place, length);
    std::size_t d = dims.size();
    for (; d > 0; --d) {
      place += t.stride(dims[d - 1]);
      if (++at[d - 1] < t.size(dims[d - 1])) break;
      place -= t.stride(dims[d - 1]) * t.size(dims[d - 1]);
      at[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

}  // namespace

void Extent::include(const Extent& other) {
  if (other.first == other.end) return;
  if (first == end) *this = other;
  first = std::min(first, other.first);
  end = std::max(end, other.end);
}

Extent extent_of(const Tensor& t) {
  if (t.numel() == 0) return {};
  std::int64_t last = t.storage_offset();
  for (std::int64_t d = 0; d < t.dim(); ++d) last += t.stride(d) * (t.size(d) - 1);
  const auto item = static_cast<std::size_t>(t.itemsize());
  return {static_cast<std::size_t>(t.storage_offset()) * item,
          (static_cast<std::size_t>(last) + 1) * item};
}

std::size_t staged_from(const Extent& extent) { return extent.first / kMaxItem * kMaxItem; }

c10::Storage staged(const c10::Storage& storage, const Extent& extent) {
  const std::size_t from = staged_from(extent);
  const std::size_t bytes = extent.end - from;
  c10::DataPtr memory = c10::GetCPUAllocator()->allocate(rounded_up(bytes));
  if (bytes != 0) {
    const Span span(Kind::copy, "staged to cpu", bytes);
    copy_words(memory.get(), start_of(storage) + from, bytes);
  }
  return {c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                std::move(memory), c10::GetCPUAllocator(),
                                                storage.resizable())};
}

bool is_spread(const Tensor& t) {
  const Extent extent = extent_of(t);
  if (t.itemsize() % 4 != 0 || 2 * t.nbytes() >= extent.end - extent.first) return false;
  for (std::int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) == 0) return false;
  return true;
}

Tensor gathered(const Tensor& t) {
  std::vector<std::int64_t> strides(static_cast<std::size_t>(t.dim()), 1);
  std::vector<std::int64_t> dims = by_stride(t);
  std::reverse(dims.begin(), dims.end());
  std::int64_t step = 1;
  for (const std::int64_t d : dims) {
    strides[static_cast<std::size_t>(d)] = step;
    step *= t.size(d);
  }
  Tensor made = at::empty_strided(t.sizes(), strides,
                                  t.options().device(c10::DeviceType::CPU));
  const Span span(Kind::copy, "staged to cpu", t.nbytes());
  const auto item = static_cast<std::size_t>(t.itemsize());
  char* to = start_of(made.storage());
  over_runs(t, [&](std::int64_t place, std::int64_t length) {
    const std::size_t bytes = static_cast<std::size_t>(length) * item;
    copy_words(to, start_of(t.storage()) + static_cast<std::size_t>(place) * item, bytes);
    to += bytes;
  });
  return made;
}

void unstage(const Tensor& t, const Tensor& cpu) {
  if (t.numel() == 0) return;
  const auto item = static_cast<std::size_t>(t.itemsize());
  const auto* const elements = static_cast<const char*>(cpu.const_data_ptr());
  if (is_spread(t) && cpu.strides() != t.strides()) {
    const Span span(Kind::copy, "staged to qpu", t.nbytes());
    const char* from = elements;
    over_runs(t, [&](std::int64_t place, std::int64_t length) {
      const std::size_t bytes = static_cast<std::size_t>(length) * item;
      copy_words(start_of(t.storage()) + static_cast<std::size_t>(place) * item, from, bytes);
      from += bytes;
    });
    return;
  }
  const Extent extent = extent_of(t);
  const std::size_t first = extent.first / 4 * 4;  // rounded down to whole words
  const Span span(Kind::copy, "staged to qpu", extent.end - first);
  copy_words(start_of(t.storage()) + first, elements - (extent.first - first), extent.end - first);
}

}  // namespace torch_qpu
