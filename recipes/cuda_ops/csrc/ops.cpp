// The operators for torch's dispatcher. The operators use torch's stable C interface, so one
// library works with every torch version from 2.10 on.
//
// Each operator NAME has three entries:
//
//   entry                 purpose
//   NAME                  public entry; calls one of the other two
//   _NAME                 operator without gradients
//   _NAME_differentiable  operator with a backward formula, which is written in Python
//
// If gradients are enabled and one of the tensors needs a gradient, NAME calls
// _NAME_differentiable. Otherwise it calls _NAME. A call that needs no gradient therefore never
// enters Python, and takes about as long as a call of one of torch's own operators.
//
// Before torch 2.13, the stable interface does not pass error messages from one dispatcher call
// to the next. The message of an error is therefore stored in `last_refusal`.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

// These two functions are null if torch was built without CUDA or if its internals have changed.
// The declarations are here, and not in a header, because they must be weak.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
// The symbol is bool c10::TensorImpl::requires_grad() const, for which the stable interface has no
// equivalent. cuda_ops/_gradients.py checks the function's results before they are used.
__attribute__((weak)) bool requires_grad_of(const void* tensor_impl) __asm__("_ZNK3c1010TensorImpl13requires_gradEv");
}

namespace cuda_ops {
namespace {

using torch::headeronly::ScalarType;
using Sizes = std::vector<int64_t>;

thread_local std::string last_refusal;  // NOLINT(cert-err58-cpp)
bool requires_grad_is_known = false;

[[noreturn]] void refuse(const std::string& text) {
  last_refusal = "cuda_ops." + text;
  throw std::runtime_error(last_refusal);
}

// An owned tensor together with the properties that are used often. torch::stable::Tensor would
// also work, but has its reference count on the heap, which takes noticeable time in a call of a
// few microseconds.
class Operand {
 public:
  Operand(const char* name, AtenTensorHandle handle) : name_(name), handle_(handle) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &count_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &type_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device_));
  }
  // The callee owns the object that torch passes as a StableIValue.
  Operand(const char* name, StableIValue boxed) : Operand(name, torch::stable::detail::to<AtenTensorHandle>(boxed)) {}
  Operand(Operand&& other) noexcept { *this = std::move(other); }
  Operand& operator=(Operand&& other) noexcept {
    std::swap(handle_, other.handle_);
    name_ = other.name_;
    dim_ = other.dim_;
    count_ = other.count_;
    sizes_ = other.sizes_;
    strides_ = other.strides_;
    type_ = other.type_;
    device_type_ = other.device_type_;
    device_ = other.device_;
    return *this;
  }
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;
  ~Operand() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  [[nodiscard]] const char* name() const { return name_; }
  [[nodiscard]] int64_t dim() const { return dim_; }
  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] const int64_t* sizes() const { return sizes_; }
  [[nodiscard]] const int64_t* strides() const { return strides_; }
  [[nodiscard]] int32_t type() const { return type_; }
  [[nodiscard]] int32_t device_type() const { return device_type_; }
  [[nodiscard]] int32_t device() const { return device_; }
  [[nodiscard]] bool is_cuda() const { return device_type_ == aoti_torch_device_type_cuda(); }
  [[nodiscard]] bool is_cpu() const { return device_type_ == aoti_torch_device_type_cpu(); }

  [[nodiscard]] void* data() const {
    void* pointer = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle_, &pointer));
    return pointer;
  }
  [[nodiscard]] bool is_contiguous() const {
    bool answer = false;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle_, &answer));
    return answer;
  }
  // Returns a contiguous copy.
  [[nodiscard]] Operand contiguous() const {
    AtenTensorHandle own = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle_, &own));
    const auto made = torch::stable::contiguous(torch::stable::Tensor(own));
    AtenTensorHandle kept = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(made.get(), &kept));
    return {name_, kept};
  }
  [[nodiscard]] std::string shape_text() const {
    std::string text = "[";
    for (int64_t d = 0; d < dim_; ++d) text += (d == 0 ? "" : ", ") + std::to_string(sizes_[d]);
    return text + "]";
  }
  [[nodiscard]] std::string device_text() const {
    if (is_cpu()) return "the CPU";
    return is_cuda() ? "cuda:" + std::to_string(device_) : "another device type";
  }
  [[nodiscard]] const char* type_text() const { return torch::headeronly::toString(static_cast<ScalarType>(type_)); }

 private:
  const char* name_ = "";
  AtenTensorHandle handle_ = nullptr;
  int64_t dim_ = 0;
  int64_t count_ = 0;
  int64_t* sizes_ = nullptr;
  int64_t* strides_ = nullptr;
  int32_t type_ = 0;
  int32_t device_type_ = 0;
  int32_t device_ = 0;
};

Type type_of(const char* op, const Operand& operand) {
  switch (static_cast<ScalarType>(operand.type())) {
    case ScalarType::Float:
      return Type::kFloat;
    case ScalarType::Half:
      return Type::kHalf;
    case ScalarType::BFloat16:
      return Type::kBFloat16;
    default:
      refuse(std::string(op) + ": " + operand.name() + " must be float32, float16 or bfloat16, found " +
             operand.type_text());
  }
}

void require_device(const char* op, const Operand& operand) {
  if (!operand.is_cuda() && !operand.is_cpu())
    refuse(std::string(op) + ": " + operand.name() + " must be on a CUDA device or on the CPU");
}

// Checks that both operands have the same type and are on the same device, which must be a CUDA
// device or the CPU.
void require_alike(const char* op, const Operand& a, const Operand& b) {
  require_device(op, a);
  if (a.device_type() != b.device_type() || a.device() != b.device())
    refuse(std::string(op) + ": all tensors must be on the same device, found " + a.name() + " on " + a.device_text() +
           " and " + b.name() + " on " + b.device_text());
  if (a.type() != b.type())
    refuse(std::string(op) + ": all tensors must have the same type, found " + a.name() + " of " + a.type_text() +
           " and " + b.name() + " of " + b.type_text());
}

void require_same_shape(const char* op, const Operand& a, const Operand& b) {
  if (a.dim() != b.dim() || !std::equal(a.sizes(), a.sizes() + a.dim(), b.sizes()))
    refuse(std::string(op) + ": " + a.name() + " and " + b.name() + " must have the same shape, found " +
           a.shape_text() + " and " + b.shape_text());
}

// A tensor that an operator creates and whose properties are not needed.
class Result {
 public:
  Result(int64_t dim, const int64_t* sizes, const int64_t* strides, const Operand& like, int32_t type) {
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(dim, sizes, strides, type, like.device_type(), like.device(), &handle_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle_, &data_));
  }
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;
  ~Result() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] StableIValue release() { return torch::stable::detail::from(std::exchange(handle_, nullptr)); }

 private:
  AtenTensorHandle handle_ = nullptr;
  void* data_ = nullptr;
};

// Returns the strides of a contiguous tensor with the sizes of `like`.
Sizes in_rows(const Operand& like) {
  Sizes strides(static_cast<size_t>(like.dim()));
  int64_t step = 1;
  for (size_t d = strides.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(like.sizes()[d], 1);
  }
  return strides;
}

// Runs the work on the tensor's device in stream order. On a GPU, the work runs on the current
// stream. On the CPU, the work runs synchronously.
template <typename Work>
void run_beside(const Operand& operand, const char* op, const Work& work) {
  if (!operand.is_cuda()) return cpu::run(work);
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr) refuse(std::string(op) + ": this torch was built without CUDA");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(operand.device(), &stream));
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (cuda::current_device() != operand.device()) guard.emplace(operand.device());
  if (const int error = cuda::run(work, stream)) refuse(std::string(op) + ": CUDA error: " + cuda::explain(error));
}

// Returns the dimensions that have more than one element, sorted by the comparison `first`.
template <typename Before>
std::vector<size_t> order_of(const Operand& operand, Before first) {
  std::vector<size_t> order;
  for (size_t d = 0; d < static_cast<size_t>(operand.dim()); ++d)
    if (operand.sizes()[d] != 1) order.push_back(d);
  std::stable_sort(order.begin(), order.end(), first);
  return order;
}

// Returns true if a tensor fills its memory without gaps or overlaps, regardless of the order of
// its dimensions.
bool fills_its_memory(const Operand& operand) {
  const int64_t* strides = operand.strides();
  int64_t expected = 1;
  for (const size_t d : order_of(operand, [&](size_t a, size_t b) { return strides[a] < strides[b]; })) {
    if (strides[d] != expected) return false;
    expected *= operand.sizes()[d];
  }
  return true;
}

// Sorts the dimensions in the order of the output's memory, and merges adjacent dimensions if all
// operands allow it. Returns false if too many dimensions remain.
bool lay_out(Elementwise& work, const Operand& like, const std::vector<const int64_t*>& strides) {
  work.dims = 0;
  for (const size_t d : order_of(like, [&](size_t a, size_t b) { return strides[0][a] > strides[0][b]; })) {
    const int64_t size = like.sizes()[d];
    bool joins = work.dims > 0;
    for (size_t operand = 0; joins && operand < strides.size(); ++operand)
      joins = work.strides[operand][work.dims - 1] == strides[operand][d] * size;
    if (!joins && work.dims == kMaxDims) return false;
    const int at = joins ? work.dims - 1 : work.dims++;
    work.sizes[at] = joins ? work.sizes[at] * size : size;
    for (size_t operand = 0; operand < strides.size(); ++operand) work.strides[operand][at] = strides[operand][d];
  }
  return true;
}

void run_elementwise(const char* op, Elementwise& work, void* out, const Operand& a, const Operand* b) {
  work.out = out;
  work.in = {a.data(), b == nullptr ? nullptr : b->data()};
  run_beside(a, op, work);
}

// If the inputs have the same layout without gaps, the output also has this layout. Otherwise the
// output's rows are contiguous.
StableIValue elementwise(const char* op, Elementwise& work, const Operand& a, const Operand* b) {
  work.type = type_of(op, a);
  work.inputs = b == nullptr ? 1 : 2;
  work.count = a.count();
  const bool alike = b == nullptr || std::equal(a.strides(), a.strides() + a.dim(), b->strides());
  if (alike && (a.is_contiguous() || fills_its_memory(a))) {
    Result out(a.dim(), a.sizes(), a.strides(), a, a.type());
    work.dims = 1;
    work.sizes[0] = work.count;
    for (auto& operand : work.strides) operand[0] = 1;
    run_elementwise(op, work, out.data(), a, b);
    return out.release();
  }
  const Sizes strides = in_rows(a);
  std::vector<const int64_t*> all = {strides.data(), a.strides()};
  if (b != nullptr) all.push_back(b->strides());
  if (!lay_out(work, a, all)) {
    const Operand dense = a.contiguous();
    if (b == nullptr) return elementwise(op, work, dense, nullptr);
    const Operand other = b->contiguous();
    return elementwise(op, work, dense, &other);
  }
  Result out(a.dim(), a.sizes(), strides.data(), a, a.type());
  run_elementwise(op, work, out.data(), a, b);
  return out.release();
}

// Boxed kernels. torch passes a stack of arguments and reads the result from element 0 of the
// stack.

void add2(StableIValue* stack, uint64_t /*arguments*/, uint64_t /*results*/) {
  const Operand a("a", stack[0]);
  const Operand b("b", stack[1]);
  require_alike("add2", a, b);
  require_same_shape("add2", a, b);
  Elementwise work;
  work.function = Function::kAdd;
  stack[0] = elementwise("add2", work, a, &b);
}

void axpy(StableIValue* stack, uint64_t /*arguments*/, uint64_t /*results*/) {
  const Operand x("x", stack[1]);
  const Operand y("y", stack[2]);
  require_alike("axpy", x, y);
  require_same_shape("axpy", x, y);
  Elementwise work;
  work.function = Function::kAxpy;
  work.alpha = static_cast<float>(torch::stable::detail::to<double>(stack[0]));
  stack[0] = elementwise("axpy", work, x, &y);
}

void exp(StableIValue* stack, uint64_t /*arguments*/, uint64_t /*results*/) {
  const Operand x("x", stack[0]);
  require_device("exp", x);
  Elementwise work;
  work.function = Function::kExp;
  stack[0] = elementwise("exp", work, x, nullptr);
}

void softmax(StableIValue* stack, uint64_t /*arguments*/, uint64_t /*results*/) {
  const Operand x("x", stack[0]);
  require_device("softmax", x);
  Softmax work;
  work.type = type_of("softmax", x);
  const int64_t last = x.dim() - 1;
  work.columns = last < 0 ? 1 : x.sizes()[last];
  work.rows = work.columns == 0 ? 0 : x.count() / work.columns;
  // If the distances between the rows are equal, the rows are read in place. Any other layout is
  // copied first.
  const bool in_place = x.is_contiguous() || (x.dim() == 2 && (x.strides()[1] == 1 || work.columns == 1));
  std::optional<Operand> copy;
  if (!in_place) copy.emplace(x.contiguous());
  work.row_stride = in_place && x.dim() == 2 ? x.strides()[0] : work.columns;
  Result out(x.dim(), x.sizes(), in_rows(x).data(), x, x.type());
  work.in = in_place ? x.data() : copy->data();
  work.out = out.data();
  run_beside(x, "softmax", work);
  stack[0] = out.release();
}

void matvec(StableIValue* stack, uint64_t /*arguments*/, uint64_t /*results*/) {
  const Operand matrix("matrix", stack[0]);
  const Operand vector("vector", stack[1]);
  require_alike("matvec", matrix, vector);
  if (matrix.dim() != 2 || vector.dim() != 1 || matrix.sizes()[1] != vector.sizes()[0])
    refuse("matvec: expected a matrix [rows, columns] and a vector [columns], found " + matrix.shape_text() + " and " +
           vector.shape_text());
  Matvec work;
  work.type = type_of("matvec", matrix);
  work.rows = matrix.sizes()[0];
  work.columns = matrix.sizes()[1];
  work.row_stride = matrix.strides()[0];
  work.column_stride = work.columns == 1 ? 1 : matrix.strides()[1];
  std::optional<Operand> dense;
  if (!vector.is_contiguous()) dense.emplace(vector.contiguous());
  work.matrix = matrix.data();
  work.vector = dense ? dense->data() : vector.data();
  constexpr int64_t kOne = 1;
  Result out(1, &work.rows, &kOne, matrix, matrix.type());
  work.out = out.data();
  std::optional<Result> partial;
  if (matrix.is_cuda()) work.splits = cuda::splits_of(work);
  if (work.splits > 1) {
    // The allocator reuses this memory only for later work on the same stream. The memory may
    // therefore be freed before it has been used.
    const int64_t size = work.splits * work.rows;
    partial.emplace(1, &size, &kOne, matrix, static_cast<int32_t>(ScalarType::Float));
    work.partial = static_cast<float*>(partial->data());
  }
  run_beside(matrix, "matvec", work);
  stack[0] = out.release();
}

// Computes c[i] = a[i] + b[i] for 0 <= i < n. The operator is called like a kernel launcher, so
// the caller allocates c.
void torch_launch_add2(StableIValue* stack, uint64_t /*arguments*/, uint64_t /*results*/) {
  const char* op = "torch_launch_add2";
  const Operand c("c", stack[0]);
  const Operand a("a", stack[1]);
  const Operand b("b", stack[2]);
  const auto n = torch::stable::detail::to<int64_t>(stack[3]);
  require_alike(op, c, a);
  require_alike(op, c, b);
  Elementwise work;
  work.function = Function::kAdd;
  work.type = type_of(op, c);
  work.inputs = 2;
  work.count = n;
  work.dims = 1;
  work.sizes[0] = n;
  const std::array<const Operand*, Elementwise::kOperands> all{&c, &a, &b};
  for (size_t i = 0; i < all.size(); ++i) {
    const Operand& operand = *all[i];
    if (n < 0 || n > operand.count())
      refuse(std::string(op) + ": n must be 0 to " + std::to_string(operand.count()) + ", the size of " +
             operand.name() + ", found " + std::to_string(n));
    const bool dense = operand.is_contiguous();
    if (!dense && operand.dim() != 1)
      refuse(std::string(op) + ": " + operand.name() + " must be contiguous or one-dimensional");
    work.strides[i][0] = dense ? 1 : operand.strides()[0];
  }
  if (work.strides[0][0] == 0 && n > 1) refuse(std::string(op) + ": several elements of c share one memory location");
  run_elementwise(op, work, c.data(), a, &b);
}

AtenTensorHandle tensor_in(StableIValue boxed) { return torch::stable::detail::to<AtenTensorHandle>(boxed); }

bool has_gradient(AtenTensorHandle tensor) {
  // A handle points to an at::Tensor. An at::Tensor consists of a single pointer, which refers to
  // its TensorImpl.
  return requires_grad_of(*reinterpret_cast<const void* const*>(tensor));
}

// The full names of the entries _NAME and _NAME_differentiable.
using Names = std::array<const char*, 2>;

// The entry NAME calls _NAME, or _NAME_differentiable if one of the tensors needs a gradient.
// kTensors contains the indices of the tensors. The stack is passed on unchanged.
template <const Names* kNames, size_t... kTensors>
void hand_on(StableIValue* stack, uint64_t /*arguments*/, uint64_t /*results*/) {
  const bool gradient = aoti_torch_grad_mode_is_enabled() &&
                        (!requires_grad_is_known || (has_gradient(tensor_in(stack[kTensors])) || ...));
  last_refusal.clear();
  const AOTITorchError error = torch_call_dispatcher((*kNames)[gradient ? 1 : 0], "", stack, TORCH_ABI_VERSION);
  if (error != TORCH_SUCCESS && !last_refusal.empty()) throw std::runtime_error(last_refusal);
  TORCH_ERROR_CODE_CHECK(error);
}

constexpr Names kAdd2{"cuda_ops::_add2", "cuda_ops::_add2_differentiable"};
constexpr Names kAxpy{"cuda_ops::_axpy", "cuda_ops::_axpy_differentiable"};
constexpr Names kExp{"cuda_ops::_exp", "cuda_ops::_exp_differentiable"};
constexpr Names kSoftmax{"cuda_ops::_softmax", "cuda_ops::_softmax_differentiable"};
constexpr Names kMatvec{"cuda_ops::_matvec", "cuda_ops::_matvec_differentiable"};

void requires_grad(StableIValue* stack, uint64_t /*arguments*/, uint64_t /*results*/) {
  AtenTensorHandle tensor = tensor_in(stack[0]);
  const bool answer = requires_grad_of != nullptr && has_gradient(tensor);
  aoti_torch_delete_tensor_object(tensor);
  stack[0] = torch::stable::detail::from(answer);
}

void trust_requires_grad(StableIValue* stack, uint64_t /*arguments*/, uint64_t /*results*/) {
  requires_grad_is_known = torch::stable::detail::to<bool>(stack[0]) && requires_grad_of != nullptr;
}

void define(torch::stable::detail::StableLibrary& library, const std::string& name, const std::string& rest) {
  for (const std::string& entry : {name, "_" + name, "_" + name + "_differentiable"})
    library.def((entry + rest).c_str());
}

void compute(torch::stable::detail::StableLibrary& library) {
  library.impl("add2", add2).impl("_add2", add2).impl("_add2_differentiable", add2);
  library.impl("axpy", axpy).impl("_axpy", axpy).impl("_axpy_differentiable", axpy);
  library.impl("exp", exp).impl("_exp", exp).impl("_exp_differentiable", exp);
  library.impl("softmax", softmax).impl("_softmax", softmax).impl("_softmax_differentiable", softmax);
  library.impl("matvec", matvec).impl("_matvec", matvec).impl("_matvec_differentiable", matvec);
  library.impl("torch_launch_add2", torch_launch_add2);
}

}  // namespace
}  // namespace cuda_ops

STABLE_TORCH_LIBRARY(cuda_ops, library) {
  cuda_ops::define(library, "add2", "(Tensor a, Tensor b) -> Tensor");
  cuda_ops::define(library, "axpy", "(float alpha, Tensor x, Tensor y) -> Tensor");
  cuda_ops::define(library, "exp", "(Tensor x) -> Tensor");
  cuda_ops::define(library, "softmax", "(Tensor x) -> Tensor");
  cuda_ops::define(library, "matvec", "(Tensor matrix, Tensor vector) -> Tensor");
  library.def("torch_launch_add2(Tensor(a!) c, Tensor a, Tensor b, int n) -> ()");
  library.def("_requires_grad(Tensor tensor) -> bool");
  library.def("_trust_requires_grad(bool known) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(cuda_ops, Autograd, library) {
  library.impl("add2", cuda_ops::hand_on<&cuda_ops::kAdd2, 0, 1>);
  library.impl("axpy", cuda_ops::hand_on<&cuda_ops::kAxpy, 1, 2>);
  library.impl("exp", cuda_ops::hand_on<&cuda_ops::kExp, 0>);
  library.impl("softmax", cuda_ops::hand_on<&cuda_ops::kSoftmax, 0>);
  library.impl("matvec", cuda_ops::hand_on<&cuda_ops::kMatvec, 0, 1>);
}

STABLE_TORCH_LIBRARY_IMPL(cuda_ops, CompositeImplicitAutograd, library) {
  library.impl("_requires_grad", cuda_ops::requires_grad);
  library.impl("_trust_requires_grad", cuda_ops::trust_requires_grad);
}

STABLE_TORCH_LIBRARY_IMPL(cuda_ops, CUDA, library) { cuda_ops::compute(library); }
STABLE_TORCH_LIBRARY_IMPL(cuda_ops, CPU, library) { cuda_ops::compute(library); }
