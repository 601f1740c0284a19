// Training kernels that libqpu's kernel library does not provide, written in libqpu's language:
// gradients of pooling and convolution, batch statistics, and losses over classes. Independent of
// torch and of QPULib, whose macros are used in learning.cpp only.
//
// Arrays must be dense and in shared memory. `qpus` is 1 to 12, or 0 for all; it affects only the
// order of additions in a sum over rows. Callers must ensure that sizes that are multiplied fit
// in 24 bits and that arrays have fewer than 2^28 elements. All functions throw qpu::Error and
// OutOfMemory.
#ifndef TORCH_QPU_LEARNING_H
#define TORCH_QPU_LEARNING_H

#include <cstdint>
#include <vector>

namespace torch_qpu::learning {

// out[plane][i] = in[firsts[plane] + places[i]], or 0 if places[i] is negative.
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

// The index, within its plane, of the greatest element in each window: the first if several are
// equal, -1 if the window contains only padding.
void pool_places(std::int64_t* places, const float* in, const Pooling& shape, int qpus);
// The gradient of each element.
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
// The middles have one value per channel; empty means 0.
Moments moments(const float* a, const float* b, const std::vector<float>& middle_a,
                const std::vector<float>& middle_b, const Planes& shape, int qpus);

// The parameters of one channel in blend().
struct Blend {
  float middle_a = 0;
  float factor_a = 0;
  float middle_b = 0;
  float factor_b = 0;
};
// out = (a - middle_a) factor_a + (b - middle_b) factor_b; out may be a or b.
void blend(float* out, const float* a, const float* b, const std::vector<Blend>& channels,
           const Planes& shape, int qpus);

// For each row, in place: a - max - log(sum(exp(a - max))).
void log_softmax(float* out, const float* a, int rows, int columns, int qpus);
// From the gradient of the result and the result, for each row, in place:
// gradient - exp(result) sum(gradient).
void log_softmax_backward(float* out, const float* gradient, const float* result, int rows,
                          int columns, int qpus);
// result (gradient - sum(gradient result)).
void softmax_backward(float* out, const float* gradient, const float* result, int rows,
                      int columns, int qpus);

// The class of each row, and the weight of each class.
struct Classes {
  const std::int64_t* targets = nullptr;
  std::int64_t ignored = 0;  // rows with this target do not contribute
  const float* weights = nullptr;  // null for 1
  int rows = 0;
  int classes = 0;
};

struct Loss {
  double sum = 0;
  double weight = 0;
  bool any_unknown = false;  // a target is not a class
};
// losses[row] = -a[row][target] weight, and their sum.
Loss nll(float* losses, const float* a, const Classes& of, int qpus);
// out[row][c] is factor * gradient * weight if c is the row's class, else 0. There is one
// gradient per row, or a single one for all rows with `one_gradient`.
void nll_backward(float* out, const float* gradient, bool one_gradient, float factor,
                  const Classes& of, int qpus);

}  // namespace torch_qpu::learning

#endif
