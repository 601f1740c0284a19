#include "qpu/kernels.h"
#include "qpu_kernels.h"
#include "runtime/failure.hpp"

namespace {

namespace k = qpu::kernels;

k::Floats at(const float* p) { return const_cast<float*>(p); }
k::Matrix matrix(const qpu_matrix& m) { return {at(m.data), m.row_stride, m.column_stride}; }

k::Window window(const qpu_window& w) {
  k::Window r;
  r.batch = w.batch;
  r.channels = w.channels;
  r.height = w.height;
  r.width = w.width;
  r.kernelHeight = w.kernel_height;
  r.kernelWidth = w.kernel_width;
  r.strideY = w.stride_y;
  r.strideX = w.stride_x;
  r.paddingY = w.padding_y;
  r.paddingX = w.padding_x;
  r.dilationY = w.dilation_y;
  r.dilationX = w.dilation_x;
  r.groups = w.groups == 0 ? 1 : w.groups;
  return r;
}

template <typename F>
int guarded(F f) noexcept {
  return qpu::runtime::guarded(-1, [&f] {
    f();
    return 0;
  });
}

}  // namespace

int qpu_add(float* out, const float* a, const float* b, int n, int qpus) {
  return guarded([&] { k::add(at(out), at(a), at(b), n, qpus); });
}
int qpu_sub(float* out, const float* a, const float* b, int n, int qpus) {
  return guarded([&] { k::sub(at(out), at(a), at(b), n, qpus); });
}
int qpu_mul(float* out, const float* a, const float* b, int n, int qpus) {
  return guarded([&] { k::mul(at(out), at(a), at(b), n, qpus); });
}
int qpu_fma(float* out, const float* a, const float* b, const float* c, int n, int qpus) {
  return guarded([&] { k::fma(at(out), at(a), at(b), at(c), n, qpus); });
}
int qpu_axpy(float* out, float factor, const float* a, const float* b, int n, int qpus) {
  return guarded([&] { k::axpy(at(out), factor, at(a), at(b), n, qpus); });
}
int qpu_scale(float* out, float factor, const float* a, int n, int qpus) {
  return guarded([&] { k::scale(at(out), factor, at(a), n, qpus); });
}
int qpu_relu(float* out, const float* a, int n, int qpus) {
  return guarded([&] { k::relu(at(out), at(a), n, qpus); });
}
int qpu_clamp(float* out, const float* a, float low, float high, int n, int qpus) {
  return guarded([&] { k::clamp(at(out), at(a), low, high, n, qpus); });
}
int qpu_exp(float* out, const float* a, int n, int qpus) {
  return guarded([&] { k::exp(at(out), at(a), n, qpus); });
}
int qpu_sqrt(float* out, const float* a, int n, int qpus) {
  return guarded([&] { k::sqrt(at(out), at(a), n, qpus); });
}
int qpu_sigmoid(float* out, const float* a, int n, int qpus) {
  return guarded([&] { k::sigmoid(at(out), at(a), n, qpus); });
}
int qpu_tanh(float* out, const float* a, int n, int qpus) {
  return guarded([&] { k::tanh(at(out), at(a), n, qpus); });
}

int qpu_sum(float* result, const float* a, int n, int qpus) {
  return guarded([&] { *result = k::sum(at(a), n, qpus); });
}
int qpu_dot(float* result, const float* a, const float* b, int n, int qpus) {
  return guarded([&] { *result = k::dot(at(a), at(b), n, qpus); });
}
int qpu_norm(float* result, const float* a, int n, int qpus) {
  return guarded([&] { *result = k::norm(at(a), n, qpus); });
}
int qpu_max(float* result, const float* a, int n, int qpus) {
  return guarded([&] { *result = k::max(at(a), n, qpus); });
}
int qpu_argmax(int* result, const float* a, int n, int qpus) {
  return guarded([&] { *result = k::argmax(at(a), n, qpus); });
}

int qpu_matvec(float* y, qpu_matrix a, const float* x, int m, int columns, int qpus) {
  return guarded([&] { k::matvec(at(y), matrix(a), at(x), m, columns, qpus); });
}
int qpu_matmul(qpu_matrix c, qpu_matrix a, qpu_matrix b, int m, int n, int depth, float alpha,
               float beta, int qpus) {
  return guarded(
      [&] { k::matmul(matrix(c), matrix(a), matrix(b), m, n, depth, alpha, beta, qpus); });
}
int qpu_softmax(float* out, const float* a, int rows, int columns, int row_stride, int qpus) {
  return guarded([&] { k::softmax(at(out), at(a), rows, columns, row_stride, qpus); });
}

int qpu_conv2d(float* out, const float* a, const float* weights, const float* bias,
               const qpu_window* w, int out_channels, int qpus) {
  return guarded([&] {
    k::conv2d(at(out), at(a), at(weights), at(bias), window(*w), out_channels, qpus);
  });
}
int qpu_max_pool2d(float* out, const float* a, const qpu_window* w, int qpus) {
  return guarded([&] { k::maxPool2d(at(out), at(a), window(*w), qpus); });
}
int qpu_batch_norm(float* out, const float* a, const float* mean, const float* variance,
                   const float* weight, const float* bias, float epsilon, int batch, int channels,
                   int size, int qpus) {
  return guarded([&] {
    k::batchNorm(at(out), at(a), at(mean), at(variance), at(weight), at(bias), epsilon, batch,
                 channels, size, qpus);
  });
}
