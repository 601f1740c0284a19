// Kernels of training that libqpu's library does not have, in its language: gradients
// of pooling and convolution, batch statistics, losses over classes. Nothing of torch
// here and nothing of QPULib: its macros stay in learning.cpp.
//
// Arrays are dense and in shared memory; `qpus` is 1..12, 0 for all, and results do
// not depend on it but for the order of a sum over rows. Sizes that are multiplied have
// 24 bits, arrays less than 2^28 elements: callers see to it. All throw qpu::Error and
// OutOfMemory.
#ifndef TORCH_QPU_LEARNING_H
#define TORCH_QPU_LEARNING_H

#include <cstdint>
#include <vector>

namespace torch_qpu::learning {

// out[plane][i] = in[firsts[plane] + places[i]], or 0 where places[i] is below 0.
void take(float* out, const float* in, const std::vector<int>& firsts,
          const std::vector<int>& places, int qpus);

// A window over planes.
struct Pooling {
  int planes = 0;
  int height = 0;
  int width = 0;
  int out_height = 0;
  int out_width = 0;
  int kernel_height = 0;
  int kernel_width = 0;
  int stride_y = 1;
  int stride_x = 1;
  int padding_y = 0;
  int padding_x = 0;
  int dilation_y = 1;
  int dilation_x = 1;
};

// Where in its plane the greatest element under the window is, the first of equal
// ones; -1 where the window holds padding alone.
void pool_places(std::int64_t* places, const float* in, const Pooling& shape, int qpus);
// Each element's part of the gradient.
void pool_backward(float* out, const float* gradient, const std::int64_t* places,
                   const Pooling& shape, int qpus);

// Planes [batch][channels] of `size` elements.
struct Planes {
  int batch = 0;
  int channels = 0;
  int size = 0;
};

// Sums over the batch and the planes of each channel.
struct Moments {
  std::vector<double> sum;      // of a - middle_a
  std::vector<double> product;  // of (a - middle_a) (b - middle_b)
};
// The middles are of each channel, or empty for 0.
Moments moments(const float* a, const float* b, const std::vector<float>& middle_a,
                const std::vector<float>& middle_b, const Planes& shape, int qpus);

// Of a channel in blend().
struct Blend {
  float middle_a = 0;
  float factor_a = 0;
  float middle_b = 0;
  float factor_b = 0;
};
// out = (a - middle_a) factor_a + (b - middle_b) factor_b; may be a or b.
void blend(float* out, const float* a, const float* b, const std::vector<Blend>& channels,
           const Planes& shape, int qpus);

// Of each row, in place: a - max - log(sum(exp(a - max))).
void log_softmax(float* out, const float* a, int rows, int columns, int qpus);
// From the gradient of the result and the result, per row, in place:
// gradient - exp(result) sum(gradient).
void log_softmax_backward(float* out, const float* gradient, const float* result, int rows,
                          int columns, int qpus);
// result (gradient - sum(gradient result)).
void softmax_backward(float* out, const float* gradient, const float* result, int rows,
                      int columns, int qpus);

// Which class each row is of, and what a row of that class weighs.
struct Classes {
  const std::int64_t* targets = nullptr;
  std::int64_t ignored = 0;  // rows with this target count for nothing
  const float* weights = nullptr;  // null for 1
  int rows = 0;
  int classes = 0;
};

struct Loss {
  double sum = 0;
  double weight = 0;
  bool any_unknown = false;  // a target is no class
};
// losses[row] = -a[row][target] weight, and their sum.
Loss nll(float* losses, const float* a, const Classes& of, int qpus);
// out[row][c] is factor * gradient * weight where c is the row's class, else 0. The
// gradient is of each row, or with `one_gradient` the same of all.
void nll_backward(float* out, const float* gradient, bool one_gradient, float factor,
                  const Classes& of, int qpus);

}  // namespace torch_qpu::learning

#endif
