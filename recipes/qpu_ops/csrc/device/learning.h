// Training kernels that libqpu's kernel library does not provide: gradients of pooling and
// convolution, batch statistics, and losses over classes. The kernels are written in libqpu's
// kernel language. This file does not depend on torch or on QPULib. Only learning.cpp uses QPULib's
// macros.
//
// Arrays must be dense and in shared memory. `qpus` is 1 to 12, or 0 for all QPUs. The number of
// QPUs affects only the order of the additions in a sum over rows. Callers must ensure that sizes
// that are multiplied fit in 24 bits and that arrays have fewer than 2^28 elements. All functions
// can throw qpu::Error and OutOfMemory.
#ifndef TORCH_QPU_LEARNING_H
#define TORCH_QPU_LEARNING_H

#include <cstdint>
#include <vector>

namespace torch_qpu::learning {

// Computes out[plane][i] = in[firsts[plane] + places[i]], or 0 if places[i] is negative.
void take(float* out, const float* in, const std::vector<int>& firsts,
          const std::vector<int>& places, int qpus);

// The window of a pooling operation on planes.
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

// Finds the greatest element of each window, and computes its index within the plane. If several
// elements are equal to the maximum, the result is the index of the first of these elements. If the
// window contains only padding, the index is -1.
void pool_places(std::int64_t* places, const float* in, const Pooling& shape, int qpus);
// Computes the gradient of each element.
void pool_backward(float* out, const float* gradient, const std::int64_t* places,
                   const Pooling& shape, int qpus);

// Planes [batch][channels] of `size` elements each.
struct Planes {
  int batch = 0;
  int channels = 0;
  int size = 0;
};

// For each channel, sums over the batch and over the elements of the planes.
struct Moments {
  std::vector<double> sum;      // sum of a - middle_a
  std::vector<double> product;  // sum of (a - middle_a) (b - middle_b)
};
// The middles contain one value per channel. An empty list means 0.
Moments moments(const float* a, const float* b, const std::vector<float>& middle_a,
                const std::vector<float>& middle_b, const Planes& shape, int qpus);

// The parameters of blend() for one channel.
struct Blend {
  float middle_a = 0;
  float factor_a = 0;
  float middle_b = 0;
  float factor_b = 0;
};
// Computes out = (a - middle_a) factor_a + (b - middle_b) factor_b. `out` may be the same array
// as `a` or `b`.
void blend(float* out, const float* a, const float* b, const std::vector<Blend>& channels,
           const Planes& shape, int qpus);

// Computes a - max - log(sum(exp(a - max))) for each row, in place.
void log_softmax(float* out, const float* a, int rows, int columns, int qpus);
// Computes gradient - exp(result) sum(gradient) for each row, in place. `gradient` is the
// gradient of the result.
void log_softmax_backward(float* out, const float* gradient, const float* result, int rows,
                          int columns, int qpus);
// Computes result (gradient - sum(gradient result)) for each row.
void softmax_backward(float* out, const float* gradient, const float* result, int rows,
                      int columns, int qpus);

// The class of each row, and the weight of each class.
struct Classes {
  const std::int64_t* targets = nullptr;
  std::int64_t ignored = 0;  // rows with this target do not contribute to the loss
  const float* weights = nullptr;  // null means that all weights are 1
  int rows = 0;
  int classes = 0;
};

struct Loss {
  double sum = 0;
  double weight = 0;
  bool any_unknown = false;  // true if a target is not a class
};
// Computes losses[row] = -a[row][target] weight, and returns their sum.
Loss nll(float* losses, const float* a, const Classes& of, int qpus);
// Sets out[row][c] to factor * gradient * weight if c is the row's class, and to 0 otherwise.
// There is one gradient per row. If `one_gradient` is true, there is a single gradient for all
// rows.
void nll_backward(float* out, const float* gradient, bool one_gradient, float factor,
                  const Classes& of, int qpus);

}  // namespace torch_qpu::learning

#endif
