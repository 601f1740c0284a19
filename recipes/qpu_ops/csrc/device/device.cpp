// PyTorch's device "qpu": the allocator, the guard, the hooks, the generator, the operators that
// create, view and copy tensors, and the fallback to the CPU.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chains.h"
#include "memory.h"
#include "staging.h"
#include "trace.h"

namespace torch_qpu {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

const c10::Device kOnly(kDevice, 0);

// --- memory --------------------------------------------------------------------

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    try {
      memory = torch_qpu::allocate(bytes);
    } catch (const OutOfMemory& fault) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, fault.what());
    }
    return {memory, memory, &release, kOnly};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    copy_words(to, from, bytes);
  }
};

Allocator& allocator() {
  static auto* const only = new Allocator;
  return *only;
}
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator())

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  c10::DataPtr grown = allocator().allocate(bytes);
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept != 0) copy_words(grown.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(grown));
  storage.set_nbytes(bytes);
}

// --- device, streams, events ---------------------------------------------------

void require_only(c10::Device device) {
  TORCH_CHECK(device.type() == kDevice && device.index() <= 0, "the only device is qpu:0, found ",
              device);
}

// Launches are synchronous, so the device's only stream is always idle.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    require_only(device);
    return kOnly;
  }
  c10::Device getDevice() const override { return kOnly; }
  void setDevice(c10::Device device) const override { require_only(device); }
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::Stream getStream(c10::Device /*device*/) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*high*/) const override {
    return stream();
  }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return stream();
  }
  c10::Stream exchangeStream(c10::Stream /*stream*/) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(c10::DeviceIndex /*index*/) const override {}

  // An event contains the time at which it was recorded.
  using Time = std::chrono::steady_clock::time_point;
  void record(void** event, const c10::Stream& /*stream*/, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Time;
    *static_cast<Time*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* /*event*/) const override {}
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Time*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex /*index*/) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "both events must be recorded first");
    return std::chrono::duration<double, std::milli>(*static_cast<Time*>(to) -
                                                     *static_cast<Time*>(from))
        .count();
  }

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kOnly); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- random numbers ------------------------------------------------------------

// The CPU generates the random numbers. A seed therefore results in the same numbers as on the CPU.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(kOnly, DispatchKeySet(DispatchKey::PrivateUse1)), cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const { return cpu_; }
  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu_.set_offset(offset); }
  uint64_t get_offset() const override { return cpu_.get_offset(); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return cpu_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override { return new Generator(cpu_.clone()); }

  at::Generator cpu_;
};

const at::Generator& default_generator() {
  static const auto* const only = new at::Generator(at::make_generator<Generator>());
  return *only;
}

at::Generator new_generator(c10::DeviceIndex /*index*/) { return at::make_generator<Generator>(); }
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 7
REGISTER_GENERATOR_PRIVATEUSE1(new_generator)  // later versions of torch use the hooks
#endif

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    require_only(c10::Device(kDevice, index));
  }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    setCurrentDevice(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }
  at::Device getDeviceFromPtr(void* memory) const override {
    TORCH_CHECK(owns(memory), "the address is not in a qpu tensor");
    return kOnly;
  }
  // Page-locked memory does not make copies faster, so "pinned" memory is ordinary CPU memory.
  bool isPinnedPtr(const void* /*data*/) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
  // torch 2.6 does not call these functions.
  // NOLINTBEGIN(modernize-use-override,clang-diagnostic-inconsistent-missing-override)
  virtual bool isBuilt() const { return true; }
  virtual bool isAvailable() const { return true; }
  // NOLINTEND(modernize-use-override,clang-diagnostic-inconsistent-missing-override)
};

// --- tensors -------------------------------------------------------------------

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<at::Device> device,
             std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "qpu tensors are dense");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "qpu tensors cannot be pinned");
  if (device.has_value()) require_only(*device);
  return at::detail::empty_generic(size, &allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<at::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "qpu tensors are dense");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "qpu tensors cannot be pinned");
  if (device.has_value()) require_only(*device);
  return at::detail::empty_strided_generic(size, stride, &allocator(),
                                           DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Returns a tensor of zeros that has no memory, for forward-mode differentiation.
Tensor zero_tensor(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                   std::optional<at::Layout> layout, std::optional<at::Device> device,
                   std::optional<bool> /*pinned*/) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "qpu tensors are dense");
  if (device.has_value()) require_only(*device);
  at::native::ZeroTensorAllocator without_memory(kOnly);
  return at::detail::empty_generic(
      size, &without_memory,
      DispatchKeySet(DispatchKey::PrivateUse1) | DispatchKeySet(DispatchKey::ZeroTensor),
      c10::dtype_or_default(dtype), std::nullopt);
}

void require_mutable(const Tensor& t) {
  TORCH_CHECK(!t._is_zerotensor(),
              "ZeroTensors are immutable; clone() one for a tensor that can be written");
}

// Returns the number of bytes from the start of a storage to the end of the tensor's elements.
std::size_t bytes_needed(at::IntArrayRef size, at::IntArrayRef stride, std::size_t item,
                         std::int64_t offset) {
  return at::detail::computeStorageNbytes(size, stride, item, static_cast<std::size_t>(offset));
}

void require_room(c10::StorageImpl& storage, std::size_t bytes) {
  if (bytes <= storage.nbytes()) return;
  TORCH_CHECK(storage.resizable(), "trying to resize storage that is not resizable");
  resize_storage(storage, bytes);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  require_mutable(self);
  if (self.sizes() != size) {
    c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    if (impl->numel() != 0)
      require_room(*self.storage().unsafeGetStorageImpl(),
                   bytes_needed(self.sizes(), self.strides(), self.itemsize(),
                                self.storage_offset()));
  }
  if (format.has_value() && *format != at::MemoryFormat::Preserve)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_to(Tensor& self, const c10::Storage& storage, std::int64_t offset,
               at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(storage.device().type() == kDevice, "a qpu tensor cannot be set to a storage on ",
              storage.device());
  TORCH_CHECK(offset >= 0, "expected a storage offset of at least 0, found ", offset);
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  if (impl->numel() != 0)
    require_room(*storage.unsafeGetStorageImpl(),
                 bytes_needed(self.sizes(), self.strides(), self.itemsize(), offset));
  return self;
}

Tensor& set_storage_strided(Tensor& self, c10::Storage storage, std::int64_t offset,
                            at::IntArrayRef size, at::IntArrayRef stride) {
  return set_to(self, storage, offset, size, stride);
}
Tensor& set_storage(Tensor& self, c10::Storage storage) {
  const auto elements = static_cast<std::int64_t>(storage.nbytes() / self.itemsize());
  return set_to(self, storage, 0, {elements}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_to(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_to(self, empty({0}, self.scalar_type(), {}, {}, {}, {}).storage(), 0, {0}, {1});
}

bool is_dense_alike(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.is_non_overlapping_and_dense() && !a.is_neg() &&
         !b.is_neg() && !a.is_conj() && !b.is_conj();
}

// If for_cpu(t) returned a copy, copies the CPU's result from this copy back to t.
void write_back(const Tensor& t, const Tensor& cpu) {
  if (on_device(t) && !is_plain_memory()) unstage(t, cpu);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool /*non_blocking*/) {
  if (self.is_same(source)) return self;
  if (self.numel() == 0) {
    TORCH_CHECK(at::is_expandable_to(source.sizes(), self.sizes()),
                "expected a source that can be broadcast to the shape ", self.sizes(),
                ", found the shape ", source.sizes());
    return self;
  }
  require_mutable(self);
  if (source._is_zerotensor()) return self.zero_();
  at::assert_no_partial_overlap(self, source);
  const Span span(Kind::copy,
                  on_device(self) ? on_device(source) ? "qpu to qpu" : "cpu to qpu" : "qpu to cpu",
                  self.nbytes());
  const bool words = (self.nbytes() % 4) == 0 &&
                     reinterpret_cast<std::uintptr_t>(self.const_data_ptr()) % 4 == 0 &&
                     source.device().type() != c10::DeviceType::Meta &&
                     reinterpret_cast<std::uintptr_t>(source.const_data_ptr()) % 4 == 0;
  if (words && is_dense_alike(self, source)) {
    copy_words(self.mutable_data_ptr(), source.const_data_ptr(), self.nbytes());
    return self;
  }
  const Tensor from = for_cpu(source);
  const Tensor to = for_cpu(self);
  to.copy_(from);
  write_back(self, to);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  copy_(target, self, non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const Tensor& self) { return at::_local_scalar_dense(for_cpu(self)); }

Tensor view(const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                  std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor unfold(const Tensor& self, std::int64_t dimension, std::int64_t size, std::int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
Tensor view_as_real(const Tensor& self) { return at::native::view_as_real(self); }
Tensor view_as_complex(const Tensor& self) { return at::native::view_as_complex(self); }

// Launches are synchronous, so no stream uses a tensor later.
void record_stream(Tensor& /*self*/, at::Stream /*stream*/) {}

// The CPU fills tensors, because it writes words as fast as the QPUs can store them.
Tensor& fill(Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  if (is_plain_memory()) {
    for_cpu(self).fill_(value);
    return self;
  }
  const Tensor cpu =
      at::empty_strided(self.sizes(), self.strides(), self.scalar_type(), {}, {}, {});
  cpu.fill_(value);
  return copy_(self, cpu, false);
  return self;
}
Tensor& zero(Tensor& self) { return fill(self, 0); }

// --- the fallback --------------------------------------------------------------

// The device storages that a call uses, with a CPU view of each storage. If the CPU works in
// device memory, the view covers the whole storage. Otherwise the view covers only the part
// that the tensors in the call use.
class Views {
 public:
  // cover() must be called for all tensors of a call before of() is called for the first time.
  void cover(const Tensor& t) {
    if (is_plain_memory() || !on_device(t) || !t.has_storage()) return;
    Covered& covered = covered_[t.storage().unsafeGetStorageImpl()];
    covered.extent.include(extent_of(t));
    if (!covered.first.defined()) covered.first = t;
    covered.is_one = covered.is_one && is_same_view(t, covered.first);
  }
  void cover(const c10::IValue& value) {
    if (value.isTensor()) cover(value.toTensor());
    else if (value.isTensorList())
      for (const Tensor& t : value.toTensorVector()) cover(t);
    else if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        if (t.has_value()) cover(*t);
  }

  Tensor of(const Tensor& t) {
    if (t._is_zerotensor()) return at::zeros(t.sizes(), t.scalar_type());
    const c10::StorageImpl* const storage = t.storage().unsafeGetStorageImpl();
    for (const Seen& seen : seen_)
      if (seen.device.unsafeGetStorageImpl() == storage) return over(t, seen);
    Covered& covered = covered_[storage];
    if (covered.is_one && covered.first.defined() && is_spread(t)) {
      if (!covered.few.defined()) {
        covered.few = gathered(t);
        if (t.is_conj()) covered.few.unsafeGetTensorImpl()->_set_conj(true);
        if (t.is_neg()) covered.few.unsafeGetTensorImpl()->_set_neg(true);
      }
      return covered.few;
    }
    seen_.push_back({t.storage(), for_cpu(t.storage(), covered.extent),
                     is_plain_memory() ? 0 : staged_from(covered.extent)});
    return over(t, seen_.back());
  }

  // Returns the device tensor for a CPU result. If the result is a view of a CPU view, the device
  // tensor is also a view.
  Tensor back(const Tensor& t) const {
    if (!t.defined() || t.device().type() != c10::DeviceType::CPU) return t;
    for (const Seen& seen : seen_) {
      if (t.storage().unsafeGetStorageImpl() != seen.cpu.unsafeGetStorageImpl()) continue;
      if (t.storage().data() != seen.device.data()) break;
      Tensor view = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(seen.device), DispatchKeySet(DispatchKey::PrivateUse1), t.dtype());
      view.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
      return view;
    }
    return to_device(t);
  }

 private:
  struct Covered {
    Extent extent;
    Tensor first;
    bool is_one = true;  // true if all tensors are the same view
    // The elements of this view, if they are sparse in the range that they span.
    Tensor few;
  };
  struct Seen {
    c10::Storage device;
    c10::Storage cpu;
    std::size_t first;  // position of the CPU storage's first byte in the device storage
  };

  static bool is_same_view(const Tensor& a, const Tensor& b) {
    return a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
           a.strides() == b.strides() && a.scalar_type() == b.scalar_type() &&
           a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
  }

  static c10::Storage for_cpu(const c10::Storage& storage, const Extent& extent) {
    if (!is_plain_memory()) return staged(storage, extent);
    auto* const keep = new c10::Storage(storage);
    c10::DataPtr memory(storage.mutable_data(), keep,
                        [](void* kept) { delete static_cast<c10::Storage*>(kept); },
                        c10::Device(c10::DeviceType::CPU));
    return {c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                  storage.nbytes(), std::move(memory),
                                                  c10::GetCPUAllocator(), storage.resizable())};
  }

  static Tensor over(const Tensor& t, const Seen& seen) {
    Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(seen.cpu), DispatchKeySet(DispatchKey::CPU), t.dtype());
    c10::TensorImpl* const impl = view.unsafeGetTensorImpl();
    // A tensor without elements covers no memory, so it may start before the CPU storage.
    const auto before = static_cast<std::int64_t>(seen.first / t.itemsize());
    impl->set_storage_offset(std::max<std::int64_t>(t.storage_offset() - before, 0));
    impl->set_sizes_and_strides(t.sizes(), t.strides());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (t.is_conj()) impl->_set_conj(true);
    if (t.is_neg()) impl->_set_neg(true);
    return view;
  }

  std::vector<Seen> seen_;
  std::map<const c10::StorageImpl*, Covered> covered_;
};

std::string name_of(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  return schema.name() + (schema.overload_name().empty() ? "" : ".") + schema.overload_name();
}

// The properties of a tensor, other than its elements, that a CPU kernel may change.
struct Shape {
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset;
  std::size_t bytes;  // size of the storage

  explicit Shape(const Tensor& t)
      : sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        offset(t.storage_offset()),
        bytes(t.storage().nbytes()) {}
  bool is_of(const Tensor& t) const {
    return t.sizes() == at::IntArrayRef(sizes) && t.strides() == at::IntArrayRef(strides) &&
           t.storage_offset() == offset && t.storage().nbytes() == bytes;
  }
};

struct Argument {
  std::size_t place;
  Tensor device;
  Tensor cpu;
  Shape made = Shape(cpu);
};

// If a CPU kernel worked on a copy of an argument, copies the changes back to the argument.
void bring_back(const Argument& argument) {
  const Tensor& cpu = argument.cpu;
  if (argument.made.is_of(cpu) && cpu.scalar_type() == argument.device.scalar_type()) {
    write_back(argument.device, cpu);
    return;
  }
  if (cpu.sizes() != argument.device.sizes()) argument.device.resize_(cpu.sizes());
  Tensor target = argument.device;
  copy_(target, cpu, false);
}

}  // namespace

at::Tensor for_cpu(const at::Tensor& t) {
  if (!on_device(t)) return t;
  Views views;
  views.cover(t);
  return views.of(t);
}

at::Tensor to_device(const at::Tensor& t) {
  Tensor made = empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, {}, {});
  if (t.numel() != 0) copy_(made, t, false);
  return made;
}

void require_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  // Sequence lengths stay on the CPU, as with every device.
  if (op.schema().name() == "aten::_pack_padded_sequence") return;
  const auto first = stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  bool any_device = false;
  std::optional<c10::Device> other_device;
  const auto meet = [&](const Tensor& t) {
    any_device = any_device || on_device(t);
    if (t.defined() && !on_device(t) && t.dim() > 0) other_device = t.device();
  };
  for (auto value = first; value != stack.end(); ++value) {
    if (value->isTensor()) meet(value->toTensor());
    else if (value->isTensorList())
      for (const Tensor& t : value->toTensorVector()) meet(t);
  }
  TORCH_CHECK(!any_device || !other_device.has_value(),
              "Expected all tensors to be on the same device, but ", name_of(op),
              " got tensors on qpu:0 and on ", other_device.value_or(kOnly),
              "; move them with .to('qpu')");
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  require_one_device(op, *stack);
  const std::string name = name_of(op);
  const Span span(Kind::fallback, name);
  const std::size_t count = schema.arguments().size();
  const std::size_t first = stack->size() - count;
  Views views;
  std::vector<Argument> written;
  const torch::jit::Stack before(stack->begin() + static_cast<std::ptrdiff_t>(first),
                                 stack->end());

  for (const c10::IValue& value : before) views.cover(value);
  for (std::size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[first + i];
    const auto& argument = schema.arguments()[i];
    const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      const Tensor& t = before[i].toTensor();
      if (!on_device(t)) continue;
      Tensor cpu = views.of(t);
      if (writes) written.push_back({i, t, cpu});
      value = std::move(cpu);
    } else if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& t : value.toTensorVector()) {
        all.push_back(on_device(t) ? views.of(t) : t);
        if (writes && on_device(t)) written.push_back({count, t, all[all.size() - 1]});
      }
      value = std::move(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
        all.push_back(t.has_value() && on_device(*t) ? std::optional<Tensor>(views.of(*t)) : t);
      }
      value = std::move(all);
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kDevice) value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator() || (value.isNone() && argument.name() == "generator")) {
      const at::Generator generator =
          value.isNone() ? default_generator() : value.toGenerator();
      if (generator.device().type() == kDevice)
        value = static_cast<const Generator*>(generator.unsafeGetGeneratorImpl())->cpu();
    }
  }

  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);

  for (const Argument& argument : written) bring_back(argument);
  const std::size_t returns = schema.returns().size();
  const std::size_t base = stack->size() - returns;
  for (std::size_t i = 0; i < returns; ++i) {
    c10::IValue& value = (*stack)[base + i];
    const c10::AliasInfo* const alias = schema.returns()[i].alias_info();
    if (value.isTensor()) {
      const Tensor& t = value.toTensor();
      if (alias != nullptr && alias->isWrite()) {
        for (const Argument& argument : written) {
          if (argument.place == count || !argument.cpu.is_same(t)) continue;
          value = argument.device;
          break;
        }
      } else if (t.defined()) {
        TORCH_CHECK(alias == nullptr || is_plain_memory(), name,
                    " returns a view, which the CPU cannot create in QPU memory");
        value = views.back(t);
      }
    } else if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& t : value.toTensorVector()) all.push_back(views.back(t));
      value = std::move(all);
    }
  }
}

namespace {

// --- for Python ----------------------------------------------------------------

Tensor cpu_view(const Tensor& self) {
  TORCH_CHECK(on_device(self), "cpu_view: expected a qpu tensor, found one on ", self.device());
  TORCH_CHECK(is_plain_memory(),
              "cpu_view is not available on this board: QPU memory is mapped uncached, "
              "and unaligned access may fault; use .cpu()");
  return for_cpu(self.detach());
}

void manual_seed(std::int64_t seed) {
  at::Generator generator = default_generator();
  generator.set_current_seed(static_cast<std::uint64_t>(seed));
}
std::int64_t new_seed() {
  at::Generator generator = default_generator();
  return static_cast<std::int64_t>(generator.seed());
}
std::int64_t initial_seed() {
  return static_cast<std::int64_t>(default_generator().current_seed());
}
Tensor rng_state() { return default_generator().get_state(); }
void set_rng_state(const Tensor& state) {
  at::Generator generator = default_generator();
  generator.set_state(state);
}

TORCH_LIBRARY(torch_qpu, m) {
  m.def("manual_seed(int seed) -> ()", &manual_seed);
  m.def("new_seed() -> int", &new_seed);
  m.def("initial_seed() -> int", &initial_seed);
  m.def("rng_state() -> Tensor", &rng_state);
  m.def("set_rng_state(Tensor state) -> ()", &set_rng_state);
  m.def("cpu_view(Tensor self) -> Tensor");
  m.def("chain(Tensor[] arrays, float[] numbers, str kinds, str steps) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(torch_qpu, PrivateUse1, m) { m.impl("cpu_view", &cpu_view); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zero_tensor);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_strided);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("view_as_real", &view_as_real);
  m.impl("view_as_complex", &view_as_complex);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

struct Registered {
  Registered() {
    static auto* const hooks = new Hooks;  // never deleted, because PyTorch stores the pointer
    at::RegisterPrivateUse1HooksInterface(hooks);
  }
};
const Registered registered;

}  // namespace
}  // namespace torch_qpu
