// Ready kernels over float arrays in shared memory. Each is written in the
// language, compiled at its first use, and keeps within the ranges it is given:
// any size from 0 on, no padding, any address that is a multiple of 4.
//
// Pointers are places in SharedArrays: an array, a.pointer(i), or the CPU's
// address of an element. `qpus` is 1..12; 0 lets the library choose. Results do
// not depend on it. All throw ArgumentError for sizes, strides or ranges that
// do not fit, before anything runs. An output may be the same range as an input
// where the function says "in place"; else ranges must not overlap.
//
// Arithmetic is that of the language: docs/libqpu.md, "Arithmetic". Error bounds
// are in units of the last place (ulp) as the interpreter rounds.
#ifndef QPU_KERNELS_H
#define QPU_KERNELS_H

#include "qpu/detail/export.h"
#include "qpu/shared_array.h"

namespace qpu {
namespace kernels {

typedef BusPointer<float> Floats;

// Elementwise, in place; exact as the language rounds, else with a bound. NaN stays NaN
// in relu, clamp, exp, sqrt, sigmoid and tanh; sums and products make Inf of it.
QPU_API void add(Floats out, Floats a, Floats b, int n, int qpus = 0);
QPU_API void sub(Floats out, Floats a, Floats b, int n, int qpus = 0);
QPU_API void mul(Floats out, Floats a, Floats b, int n, int qpus = 0);
// a * b + c and factor * a + b, the product rounded before the sum.
QPU_API void fma(Floats out, Floats a, Floats b, Floats c, int n, int qpus = 0);
QPU_API void axpy(Floats out, float factor, Floats a, Floats b, int n, int qpus = 0);
QPU_API void scale(Floats out, float factor, Floats a, int n, int qpus = 0);
QPU_API void relu(Floats out, Floats a, int n, int qpus = 0);
// min(max(a, low), high).
QPU_API void clamp(Floats out, Floats a, float low, float high, int n, int qpus = 0);
// To 4 ulp; results under 1.7e-38 are 0.
QPU_API void exp(Floats out, Floats a, int n, int qpus = 0);
// To 4 ulp; 0 for 0 and denormals, NaN below.
QPU_API void sqrt(Floats out, Floats a, int n, int qpus = 0);
// To 8 ulp.
QPU_API void sigmoid(Floats out, Floats a, int n, int qpus = 0);
QPU_API void tanh(Floats out, Floats a, int n, int qpus = 0);

// Over n elements. Sums are compensated: |error| <= 4 ulp of the sum of the
// magnitudes (of the products: their own rounding comes on top).
QPU_API float sum(Floats a, int n, int qpus = 0);
QPU_API float dot(Floats a, Floats b, int n, int qpus = 0);
// Square root of the sum of squares; squares above 3.4e38 overflow.
QPU_API float norm(Floats a, int n, int qpus = 0);
// n >= 1. In the order of IEEE's totalOrder, so -0 is less than 0 and a positive
// NaN is greater than Inf; argmax gives the first of equal elements.
QPU_API float max(Floats a, int n, int qpus = 0);
QPU_API int argmax(Floats a, int n, int qpus = 0);

// Element (i, j) of a matrix lies at data + i * rowStride + j * columnStride.
struct Matrix {
  Floats data;
  int rowStride;
  int columnStride;
  Matrix(Floats start, int rows, int columns = 1)
      : data(start), rowStride(rows), columnStride(columns) {}
};

// y = a x, a of m rows and k columns.
QPU_API void matvec(Floats y, Matrix a, Floats x, int m, int k, int qpus = 0);
// c = alpha a b + beta c, a of m x k and b of k x n; c's column stride must be 1.
// c is not read when beta is 0.
QPU_API void matmul(Matrix c, Matrix a, Matrix b, int m, int n, int k, float alpha = 1,
                    float beta = 0, int qpus = 0);

// Softmax of each row, in place. A row with NaN or +Inf, or of -Inf alone, becomes NaN. Rows are rowStride apart in both.
QPU_API void softmax(Floats out, Floats a, int rows, int columns, int rowStride, int qpus = 0);

// Geometry of a convolution or pooling over images [batch][channels][height][width].
struct Window {
  int batch = 1;
  int channels = 1;
  int height = 1;
  int width = 1;
  int kernelHeight = 1;
  int kernelWidth = 1;
  int strideY = 1;
  int strideX = 1;
  int paddingY = 0;
  int paddingX = 0;
  int dilationY = 1;
  int dilationX = 1;
  // Of a convolution: channels and output channels fall into so many groups, each of
  // which sees its own part alone.
  int groups = 1;

  int outHeight() const {
    return (height + 2 * paddingY - dilationY * (kernelHeight - 1) - 1) / strideY + 1;
  }
  int outWidth() const {
    return (width + 2 * paddingX - dilationX * (kernelWidth - 1) - 1) / strideX + 1;
  }
};

// out[batch][outChannels][outHeight][outWidth]; weights[outChannels][channels / groups]
// [kernelHeight][kernelWidth]; bias[outChannels] or null.
QPU_API void conv2d(Floats out, Floats a, Floats weights, Floats bias, const Window& window,
                    int outChannels, int qpus = 0);
// Greatest element under the window; padding counts as -Inf. Groups do not matter.
QPU_API void maxPool2d(Floats out, Floats a, const Window& window, int qpus = 0);

// (a - mean) / sqrt(variance + epsilon) * weight + bias per channel of
// [batch][channels][size], in place; weight and bias may be null for 1 and 0.
QPU_API void batchNorm(Floats out, Floats a, Floats mean, Floats variance, Floats weight,
                       Floats bias, float epsilon, int batch, int channels, int size,
                       int qpus = 0);

}  // namespace kernels
}  // namespace qpu

#endif
