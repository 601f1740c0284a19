// A library of kernels that process float arrays in shared memory. Each kernel is written in the
// kernel language and compiled when it is first used. Kernels access only the given ranges. Sizes
// can be any number, including 0, and arrays need no padding. Addresses must be multiples of 4.
//
// A Floats argument refers to memory in a SharedArray: an array, the result of a.pointer(i), or the
// CPU's address of an element. `qpus` is 1..12, or 0 to let the library choose. The results do not
// depend on the number of QPUs. All functions throw ArgumentError for invalid sizes, strides or
// ranges, before any kernel runs. If a function is documented as "in place", its output can be the
// same range as an input. No other ranges may overlap.
//
// The kernels use the arithmetic of the kernel language (docs/libqpu.md, "Arithmetic"). Error
// bounds are given in units in the last place (ulp) and assume the interpreter's rounding.
#ifndef QPU_KERNELS_H
#define QPU_KERNELS_H

#include "qpu/detail/export.h"
#include "qpu/shared_array.h"

namespace qpu {
namespace kernels {

typedef BusPointer<float> Floats;

// Elementwise functions, in place. If no error bound is given, each operation is exact except for
// the kernel language's rounding. relu, clamp, exp, sqrt, sigmoid and tanh return NaN for NaN.
// Sums and products turn NaN into Inf.
QPU_API void add(Floats out, Floats a, Floats b, int n, int qpus = 0);
QPU_API void sub(Floats out, Floats a, Floats b, int n, int qpus = 0);
QPU_API void mul(Floats out, Floats a, Floats b, int n, int qpus = 0);
// fma computes a * b + c, and axpy computes factor * a + b. The product is rounded before the
// addition.
QPU_API void fma(Floats out, Floats a, Floats b, Floats c, int n, int qpus = 0);
QPU_API void axpy(Floats out, float factor, Floats a, Floats b, int n, int qpus = 0);
QPU_API void scale(Floats out, float factor, Floats a, int n, int qpus = 0);
QPU_API void relu(Floats out, Floats a, int n, int qpus = 0);
// Computes min(max(a, low), high).
QPU_API void clamp(Floats out, Floats a, float low, float high, int n, int qpus = 0);
// The error is at most 4 ulp. Results below 1.7e-38 are 0.
QPU_API void exp(Floats out, Floats a, int n, int qpus = 0);
// The error is at most 4 ulp. The result is 0 for 0 and denormals, and NaN for negative numbers.
QPU_API void sqrt(Floats out, Floats a, int n, int qpus = 0);
// The errors of sigmoid and tanh are at most 8 ulp.
QPU_API void sigmoid(Floats out, Floats a, int n, int qpus = 0);
QPU_API void tanh(Floats out, Floats a, int n, int qpus = 0);

// Reductions over n elements. Sums are compensated, so the error is at most 4 ulp of the sum of the
// elements' magnitudes. For dot and norm, the rounding errors of the products are added to this
// bound.
QPU_API float sum(Floats a, int n, int qpus = 0);
QPU_API float dot(Floats a, Floats b, int n, int qpus = 0);
// Computes the square root of the sum of the squares. Squares above 3.4e38 overflow.
QPU_API float norm(Floats a, int n, int qpus = 0);
// n must be at least 1. Elements are ordered as in IEEE 754's totalOrder: -0 is less than +0, and
// a positive NaN is greater than Inf. If several elements are equal to the maximum, argmax
// returns the index of the first.
QPU_API float max(Floats a, int n, int qpus = 0);
QPU_API int argmax(Floats a, int n, int qpus = 0);

// Element (i, j) of a matrix is at data + i * rowStride + j * columnStride.
struct Matrix {
  Floats data;
  int rowStride;
  int columnStride;
  Matrix(Floats start, int rows, int columns = 1)
      : data(start), rowStride(rows), columnStride(columns) {}
};

// Computes y = a x, where a has m rows and k columns.
QPU_API void matvec(Floats y, Matrix a, Floats x, int m, int k, int qpus = 0);
// Computes c = alpha a b + beta c, where a is m x k and b is k x n. The column stride of c must
// be 1. If beta is 0, c is not read.
QPU_API void matmul(Matrix c, Matrix a, Matrix b, int m, int n, int k, float alpha = 1,
                    float beta = 0, int qpus = 0);

// Computes the softmax of each row, in place. If a row contains NaN or +Inf, or if all its elements
// are -Inf, its results are NaN. Consecutive rows are rowStride elements apart, both in the input
// and in the output.
QPU_API void softmax(Floats out, Floats a, int rows, int columns, int rowStride, int qpus = 0);

// The geometry of a convolution or pooling operation on images [batch][channels][height][width].
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
  // The number of groups into which a convolution's input and output channels are divided. A
  // group's outputs depend only on its own inputs.
  int groups = 1;

  int outHeight() const {
    return (height + 2 * paddingY - dilationY * (kernelHeight - 1) - 1) / strideY + 1;
  }
  int outWidth() const {
    return (width + 2 * paddingX - dilationX * (kernelWidth - 1) - 1) / strideX + 1;
  }
};

// The arrays have these shapes: out[batch][outChannels][outHeight][outWidth],
// weights[outChannels][channels / groups][kernelHeight][kernelWidth] and bias[outChannels].
// `bias` can be null.
QPU_API void conv2d(Floats out, Floats a, Floats weights, Floats bias, const Window& window,
                    int outChannels, int qpus = 0);
// Computes the maximum of the elements under the window. Padding is treated as -Inf. `groups` is
// ignored.
QPU_API void maxPool2d(Floats out, Floats a, const Window& window, int qpus = 0);

// Computes (a - mean) / sqrt(variance + epsilon) * weight + bias for each channel of an array
// [batch][channels][size], in place. If `weight` is null, the weights are 1. If `bias` is null,
// the biases are 0.
QPU_API void batchNorm(Floats out, Floats a, Floats mean, Floats variance, Floats weight,
                       Floats bias, float epsilon, int batch, int channels, int size,
                       int qpus = 0);

}  // namespace kernels
}  // namespace qpu

#endif
