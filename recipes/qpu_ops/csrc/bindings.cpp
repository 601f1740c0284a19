// Implements the operators torch.ops.qpu.* and the Python module qpu_ops._native. Checks the
// arguments and copies tensors to and from shared memory.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <qpu/error.h>
#include <qpu/shared_array.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "kernels.h"

namespace qpu_ops {
namespace {

// While torch.compile traces a program, sizes may be symbolic.
std::string shape_of(const at::Tensor& t) {
  std::ostringstream text;
  text << '(';
  for (std::int64_t i = 0; i < t.dim(); ++i) text << (i == 0 ? "" : ", ") << t.sym_size(i);
  text << (t.dim() == 1 ? ",)" : ")");
  return text.str();
}

void require_usable(const at::Tensor& t, const char* operation, const char* name) {
  std::ostringstream text;
  text << operation << ": " << name;
  if (t.layout() != at::kStrided) {
    text << " is expected to be a dense tensor, found layout " << t.layout()
         << "; convert it with .to_dense()";
    throw py::type_error(text.str());
  }
  const auto type = t.scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16) {
    text << " is expected to hold float32, float64, float16 or bfloat16, found " << type
         << "; convert it with .to(torch.float32)";
    throw py::type_error(text.str());
  }
  if (!t.device().is_cpu()) {
    text << " is expected on the device cpu, found " << t.device()
         << "; copy it with .cpu(), or use torch's own operators on the device qpu";
    throw std::invalid_argument(text.str());
  }
}

void require_pair(const at::Tensor& a, const at::Tensor& b, const char* operation) {
  require_usable(a, operation, "a");
  require_usable(b, operation, "b");
  if (a.scalar_type() != b.scalar_type()) {
    std::ostringstream text;
    text << operation << ": a and b are expected to have the same dtype, found " << a.scalar_type()
         << " and " << b.scalar_type() << "; convert one with .to(other.dtype)";
    throw py::type_error(text.str());
  }
}

void require_same_shape(const at::Tensor& a, const at::Tensor& b, const char* operation) {
  if (a.sizes() == b.sizes()) return;
  std::ostringstream text;
  text << operation << ": a and b are expected to have the same shape, found " << shape_of(a)
       << " and " << shape_of(b)
       << "; broadcasting is not supported, call torch.broadcast_tensors(a, b) first";
  throw std::invalid_argument(text.str());
}

void require_matrix_and_vector(const at::Tensor& a, const at::Tensor& b, const char* operation) {
  if (a.dim() == 2 && b.dim() == 1 && a.size(1) == b.size(0)) return;
  std::ostringstream text;
  text << operation << ": expected a of shape (H, W) and b of shape (W,), found " << shape_of(a)
       << " and " << shape_of(b);
  throw std::invalid_argument(text.str());
}

bool is_plain(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat && !t.is_neg() && t.size(-1) > 0 &&
         (t.stride(-1) == 1 || t.size(-1) == 1);
}

// Returns a float32 tensor whose elements are consecutive in its last dimension. If `t` already
// meets these conditions, returns `t` itself.
at::Tensor as_plain(const at::Tensor& t) {
  return is_plain(t) ? t : t.resolve_neg().to(at::kFloat).contiguous();
}

// Copies n floats, and pads them with zeros to the next multiple of 16. Returns false if one of the
// floats is Inf or NaN, because QPU instructions do not treat these values as IEEE 754 requires.
//
// On a board, `to` is device memory, in which unaligned accesses by memcpy and memset cause
// faults.
bool stage(float* to, const float* from, std::size_t n) {
  // A part has 8 KiB, so that the data is still in the L1 cache when it is checked.
  constexpr std::size_t at_once = 2048;
  constexpr std::uint32_t exponent = 0x7f800000;
  std::uint32_t special = 0;
  for (std::size_t first = 0; first < n; first += at_once) {
    const std::size_t count = std::min(at_once, n - first);
    qpu::detail::copyWords(to + first, from + first, count);
    for (std::size_t i = first; i < first + count; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, from + i, sizeof bits);
      special |= static_cast<std::uint32_t>((bits & exponent) == exponent);
    }
  }
  constexpr std::array<float, block> zeros{};
  qpu::detail::copyWords(to + n, zeros.data(), padded(n) - n);
  return special == 0;
}

// If this thread holds the GIL, releases the GIL for the lifetime of the object. Operators can be
// called by threads that do not hold the GIL.
class WithoutGil {
 public:
  WithoutGil() {
    if (PyGILState_Check() != 0) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// This function is called between launches, when this thread holds neither the GIL nor the QPUs.
void handle_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void require_settings(int qpus, std::int64_t buffer) {
  if (qpus < 1 || qpus > 12) throw std::invalid_argument("expected 1 to 12 QPUs");
  if (buffer < 1024 || buffer > (1 << 23)) {
    throw std::invalid_argument("expected a buffer of 1024 to 8388608 floats");
  }
}

struct Timed {
  at::Tensor result;
  double compute_s = 0;
};

Timed elementwise(Elementwise operation, const char* name, const at::Tensor& a_in,
                  const at::Tensor& b_in, int qpus, std::int64_t buffer) {
  require_settings(qpus, buffer);
  require_pair(a_in, b_in, name);
  require_same_shape(a_in, b_in, name);
  const WithoutGil no_gil;
  const c10::NoGradGuard no_grad;
  const at::Tensor a = a_in.detach().reshape(-1);
  const at::Tensor b = b_in.detach().reshape(-1);
  Timed out{at::empty(a.sizes(), a.options().dtype(at::kFloat)), 0};
  bool finite = true;
  // The buffer is divided equally among a, b and the result.
  constexpr auto lanes = static_cast<std::int64_t>(block);
  const std::int64_t at_once = buffer / 3 / lanes * lanes;
  for (std::int64_t first = 0; first < a.size(0); first += at_once) {
    if (first != 0) handle_signals();
    const std::int64_t n = std::min(at_once, a.size(0) - first);
    const at::Tensor part_a = as_plain(a.narrow(0, first, n));
    const at::Tensor part_b = as_plain(b.narrow(0, first, n));
    Session session(buffer);
    const Vectors shared = session.vectors(padded(n));
    finite = stage(shared.a, part_a.const_data_ptr<float>(), n) && finite;
    finite = stage(shared.b, part_b.const_data_ptr<float>(), n) && finite;
    out.compute_s += session.run(operation, padded(n), qpus);
    qpu::detail::copyWords(out.result.mutable_data_ptr<float>() + first, shared.result, n);
  }
  out.result = out.result.to(a.scalar_type());
  if (!finite) {
    const at::Tensor exact = operation == Elementwise::product ? a * b : a + b;
    const at::Tensor mask = a.to(at::kFloat).isfinite() & b.to(at::kFloat).isfinite();
    out.result = at::where(mask, out.result, exact);
  }
  out.result = out.result.view(a_in.sizes());
  return out;
}

Timed matrix_vector(const char* name, const at::Tensor& a_in, const at::Tensor& b_in, int qpus,
                    std::int64_t buffer) {
  require_settings(qpus, buffer);
  require_pair(a_in, b_in, name);
  require_matrix_and_vector(a_in, b_in, name);
  const WithoutGil no_gil;
  const c10::NoGradGuard no_grad;
  const at::Tensor a = a_in.detach();
  const at::Tensor b = b_in.detach();
  const std::int64_t height = a.size(0);
  const std::int64_t width = a.size(1);
  // The partial sums are added in double precision, so that their number and order do not
  // increase the documented error bound.
  at::Tensor totals = at::zeros({height}, a.options().dtype(at::kDouble));
  auto* const total = totals.mutable_data_ptr<double>();
  const auto wide = static_cast<std::int64_t>(padded(width));
  constexpr auto lanes = static_cast<std::int64_t>(block);
  // b occupies a quarter of the buffer, a occupies half of the buffer, and the sums occupy the last
  // quarter.
  const std::int64_t columns_at_once = std::min(wide, buffer / 4 / lanes * lanes);
  bool finite = true;
  double compute_s = 0;
  for (std::int64_t left = 0; height > 0 && left < width; left += columns_at_once) {
    const std::int64_t columns = std::min(columns_at_once, width - left);
    const auto stride = static_cast<std::int64_t>(padded(columns));
    const std::int64_t rows_at_once =
        std::max<std::int64_t>(1, std::min(buffer / 2 / stride, buffer / 4 / lanes));
    const at::Tensor part_b = as_plain(b.narrow(0, left, columns));
    const std::uint64_t tag = new_tag();
    for (std::int64_t top = 0; top < height; top += rows_at_once) {
      if (left != 0 || top != 0) handle_signals();
      const std::int64_t rows = std::min(rows_at_once, height - top);
      const at::Tensor part_a = as_plain(a.narrow(0, top, rows).narrow(1, left, columns));
      const auto* const from = part_a.const_data_ptr<float>();
      Session session(buffer);
      const Matrix shared = session.matrix(rows, stride);
      if (!session.has_vector(tag)) {
        session.set_vector_tag(0);
        finite = stage(shared.b, part_b.const_data_ptr<float>(), columns) && finite;
        session.set_vector_tag(tag);
      }
      for (std::int64_t row = 0; row < rows; ++row) {
        finite = stage(shared.a + row * stride, from + row * part_a.stride(0), columns) && finite;
      }
      compute_s += session.run_matrix(rows, stride, qpus);
      for (std::int64_t row = 0; row < rows; ++row) {
        std::array<float, block> sums;
        qpu::detail::copyWords(sums.data(), shared.sums + row * lanes, sums.size());
        for (const float sum : sums) total[top + row] += static_cast<double>(sum);
      }
    }
  }
  Timed out{totals.to(a.scalar_type()), compute_s};
  if (!finite) {
    const auto exact_type = a.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor exact = at::mv(a.to(exact_type), b.to(exact_type)).to(a.scalar_type());
    const at::Tensor mask = a.to(at::kFloat).isfinite().all(1) & b.to(at::kFloat).isfinite().all();
    out.result = at::where(mask, out.result, exact);
  }
  return out;
}

// The simple loop with which the QPUs are compared. It uses one thread and one accumulator, adds
// from left to right, and does not use vector instructions.
__attribute__((noinline)) void naive(const float* a, std::int64_t row_stride, const float* b,
                                     std::int64_t height, std::int64_t width, float* scores) {
  for (std::int64_t row = 0; row < height; ++row) {
    float sum = 0;
    for (std::int64_t column = 0; column < width; ++column) {
      sum += a[row * row_stride + column] * b[column];
    }
    scores[row] = sum;
  }
}

Timed cpu(const char* name, const at::Tensor& a_in, const at::Tensor& b_in) {
  require_pair(a_in, b_in, name);
  require_matrix_and_vector(a_in, b_in, name);
  const WithoutGil no_gil;
  const c10::NoGradGuard no_grad;
  Timed out{at::zeros({a_in.size(0)}, a_in.options().dtype(at::kFloat)), 0};
  if (a_in.size(0) > 0 && a_in.size(1) > 0) {
    const at::Tensor a = as_plain(a_in.detach());
    const at::Tensor b = as_plain(b_in.detach());
    const auto began = std::chrono::steady_clock::now();
    naive(a.const_data_ptr<float>(), a.stride(0), b.const_data_ptr<float>(), a.size(0), a.size(1),
          out.result.mutable_data_ptr<float>());
    out.compute_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }
  out.result = out.result.to(a_in.scalar_type());
  return out;
}

void require_matrices(const at::Tensor& a, const at::Tensor& b, const char* operation) {
  if (a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0)) return;
  std::ostringstream text;
  text << operation << ": expected a of shape (M, K) and b of shape (K, N), found " << shape_of(a)
       << " and " << shape_of(b);
  throw std::invalid_argument(text.str());
}

// Halves the largest dimension until the parts fit into the buffer. Sets `finite` to false if an
// operand contains Inf or NaN.
at::Tensor product_of(const at::Tensor& a, const at::Tensor& b, int qpus, std::int64_t buffer,
                      bool& finite) {
  const std::int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  if (m == 0 || n == 0 || k == 0) return at::zeros({m, n}, a.options());
  // The sizes are computed in 64 bits, because an expanded operand may have more elements than
  // there are addresses on the board.
  const auto room = [](std::int64_t rows, std::int64_t columns) {
    constexpr auto lanes = static_cast<std::int64_t>(block);
    return (rows * columns + lanes - 1) / lanes * lanes;
  };
  const std::int64_t of_a = room(m, k), of_b = room(k, n), of_result = room(m, n);
  if (of_a + of_b + of_result > buffer) {
    const auto half = [&](const at::Tensor& x, const at::Tensor& y) {
      return product_of(x, y, qpus, buffer, finite);
    };
    if (k >= m && k >= n)
      return half(a.narrow(1, 0, k / 2), b.narrow(0, 0, k / 2))
          .add_(half(a.narrow(1, k / 2, k - k / 2), b.narrow(0, k / 2, k - k / 2)));
    if (m >= n)
      return at::cat({half(a.narrow(0, 0, m / 2), b), half(a.narrow(0, m / 2, m - m / 2), b)}, 0);
    return at::cat({half(a, b.narrow(1, 0, n / 2)), half(a, b.narrow(1, n / 2, n - n / 2))}, 1);
  }
  handle_signals();
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  at::Tensor result = at::empty({m, n}, a.options());
  Session session(buffer);
  const Vectors shared = session.operands(of_a, of_b, of_result);
  finite = stage(shared.a, x.const_data_ptr<float>(), x.numel()) && finite;
  finite = stage(shared.b, y.const_data_ptr<float>(), y.numel()) && finite;
  session.run_product(static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), qpus);
  qpu::detail::copyWords(result.mutable_data_ptr<float>(), shared.result, result.numel());
  return result;
}

at::Tensor matrices(const at::Tensor& a_in, const at::Tensor& b_in, int qpus, std::int64_t buffer) {
  require_pair(a_in, b_in, "mm");
  require_matrices(a_in, b_in, "mm");
  const WithoutGil no_gil;
  const c10::NoGradGuard no_grad;
  const auto plain = [](const at::Tensor& t) { return t.detach().resolve_neg().to(at::kFloat); };
  bool finite = true;
  const at::Tensor result = product_of(plain(a_in), plain(b_in), qpus, buffer, finite);
  return finite ? result.to(a_in.scalar_type()) : at::mm(a_in.detach(), b_in.detach());
}

// Reads an environment variable at each call, as the Python modules do.
int setting(const char* name, int otherwise, int low, int high, const char* unit) {
  const char* const text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): only read
  if (text == nullptr || *text == '\0') return otherwise;
  const std::string value(text);
  const bool digits = value.size() < 6 && std::all_of(value.begin(), value.end(), [](char c) {
                        return c >= '0' && c <= '9';
                      });
  const int found = digits ? std::stoi(value) : -1;
  if (found < low || found > high) {
    std::ostringstream fault;
    fault << name << ": expected " << low << " to " << high << ' ' << unit << ", found '" << value
          << "'; unset it to use the default (" << otherwise << ')';
    throw std::invalid_argument(fault.str());
  }
  return found;
}
int set_qpus() { return setting("QPU_OPS_QPUS", 4, 1, 12, "QPUs"); }
std::int64_t set_buffer() {
  return std::int64_t{setting("QPU_OPS_BUFFER_KIB", 8192, 4, 32768, "KiB")} * 256;
}

// These functions implement the operators torch.ops.qpu.*.
at::Tensor plain_add(const at::Tensor& a, const at::Tensor& b) {
  return elementwise(Elementwise::add, "add", a, b, set_qpus(), set_buffer()).result;
}
at::Tensor plain_mul(const at::Tensor& a, const at::Tensor& b) {
  return elementwise(Elementwise::product, "mul", a, b, set_qpus(), set_buffer()).result;
}
at::Tensor plain_mv(const at::Tensor& a, const at::Tensor& b) {
  return matrix_vector("mv", a, b, set_qpus(), set_buffer()).result;
}
at::Tensor plain_mm(const at::Tensor& a, const at::Tensor& b) {
  return matrices(a, b, set_qpus(), set_buffer());
}

// shape_alike(), shape_of_mv() and shape_of_mm() return an empty tensor with the shape of the
// result. These functions are used for tracing, in which sizes may be symbolic.
bool same(const c10::SymInt& x, const c10::SymInt& y) {
  return x.sym_eq(y).expect_true(__FILE__, __LINE__);
}
at::Tensor shape_alike(const at::Tensor& a, const at::Tensor& b) {
  bool alike = a.dim() == b.dim();
  for (std::int64_t i = 0; alike && i < a.dim(); ++i) alike = same(a.sym_size(i), b.sym_size(i));
  TORCH_CHECK_VALUE(alike, "a and b are expected to have the same shape, found ", shape_of(a),
                    " and ", shape_of(b),
                    "; broadcasting is not supported, call torch.broadcast_tensors(a, b) first");
  return at::empty_symint(a.sym_sizes(), a.options());
}
at::Tensor shape_of_mv(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 1 && same(a.sym_size(1), b.sym_size(0)),
                    "mv: expected a of shape (H, W) and b of shape (W,), found ", shape_of(a),
                    " and ", shape_of(b));
  return at::empty_symint({a.sym_size(0)}, a.options());
}
at::Tensor shape_of_mm(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 2 && same(a.sym_size(1), b.sym_size(0)),
                    "mm: expected a of shape (M, K) and b of shape (K, N), found ", shape_of(a),
                    " and ", shape_of(b));
  return at::empty_symint({a.sym_size(0), b.sym_size(1)}, a.options());
}

std::tuple<at::Tensor, double> as_tuple(const Timed& timed) {
  return {timed.result, timed.compute_s};
}

}  // namespace
}  // namespace qpu_ops

TORCH_LIBRARY(qpu, m) {
  m.def("add(Tensor a, Tensor b) -> Tensor");
  m.def("mul(Tensor a, Tensor b) -> Tensor");
  m.def("mv(Tensor a, Tensor b) -> Tensor");
  m.def("mm(Tensor a, Tensor b) -> Tensor");
}
TORCH_LIBRARY_IMPL(qpu, CPU, m) {
  m.impl("add", &qpu_ops::plain_add);
  m.impl("mul", &qpu_ops::plain_mul);
  m.impl("mv", &qpu_ops::plain_mv);
  m.impl("mm", &qpu_ops::plain_mm);
}
TORCH_LIBRARY_IMPL(qpu, Meta, m) {
  m.impl("add", &qpu_ops::shape_alike);
  m.impl("mul", &qpu_ops::shape_alike);
  m.impl("mv", &qpu_ops::shape_of_mv);
  m.impl("mm", &qpu_ops::shape_of_mm);
}

PYBIND11_MODULE(_native, module) {
  using namespace qpu_ops;
  module.doc() = "Native extension of qpu_ops. Use dot_cpp, matrix_cpp and cpu_cpp.";
  install_fork_handlers();

  // The exception is never destroyed, because the interpreter is finalized before static objects
  // are destroyed.
  static const auto* error = new py::exception<qpu::Error>(module, "QpuError", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const qpu::ArgumentError& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const qpu::AllocationError& e) {
      PyErr_SetString(PyExc_MemoryError,
                      (std::string(e.what()) +
                       "; give the GPU more memory, or limit the buffers of the operations: "
                       "QPU_OPS_BUFFER_KIB")
                          .c_str());
    } catch (const qpu::Error& e) {
      PyErr_SetString(error->ptr(), e.what());
    }
  });

  // The argument checks. Their error messages contain the Python names of the operations.
  module.def("check_elementwise", [](const at::Tensor& a, const at::Tensor& b, const char* name) {
    require_pair(a, b, name);
    require_same_shape(a, b, name);
  });
  module.def("check_matrix_vector",
             [](const at::Tensor& a, const at::Tensor& b, const char* name) {
               require_pair(a, b, name);
               require_matrix_and_vector(a, b, name);
             });
  module.def(
      "product",
      [](const at::Tensor& a, const at::Tensor& b, int qpus, std::int64_t buffer) {
        return as_tuple(elementwise(Elementwise::product, "product", a, b, qpus, buffer));
      },
      py::arg("a"), py::arg("b"), py::arg("qpus"), py::arg("buffer"));
  module.def(
      "add",
      [](const at::Tensor& a, const at::Tensor& b, int qpus, std::int64_t buffer) {
        return as_tuple(elementwise(Elementwise::add, "add", a, b, qpus, buffer));
      },
      py::arg("a"), py::arg("b"), py::arg("qpus"), py::arg("buffer"));
  module.def(
      "matrix_vector",
      [](const at::Tensor& a, const at::Tensor& b, int qpus, std::int64_t buffer) {
        return as_tuple(matrix_vector("gpu", a, b, qpus, buffer));
      },
      py::arg("a"), py::arg("b"), py::arg("qpus"), py::arg("buffer"));
  module.def(
      "cpu", [](const at::Tensor& a, const at::Tensor& b) { return as_tuple(cpu("cpu", a, b)); },
      py::arg("a"), py::arg("b"));
  module.def("compilations", &compilations, py::call_guard<py::gil_scoped_release>());
  module.def("buffered", &buffered, py::call_guard<py::gil_scoped_release>());
  module.def("release_buffers", &release_buffers, py::call_guard<py::gil_scoped_release>());
  module.def("backend", [] {
    const Backend found = backend();
    return py::make_tuple(found.name, found.reason);
  });
}
