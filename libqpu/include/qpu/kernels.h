// A library of kernels over float arrays in shared memory. Each kernel is written in the language
// and compiled at its first use. Kernels access only the given ranges. Sizes can be any number
// from 0, and arrays need no padding; addresses must be multiples of 4.
//
// Pointers refer to SharedArrays: an array, a.pointer(i), or the CPU's address of an
// element. `qpus` is 1..12, or 0 to let the library choose. Results do not depend on it.
// All functions throw ArgumentError for invalid sizes, strides or ranges before anything
// runs. An output can be the same range as an input if the function is documented as
// "in place". Other ranges must not overlap.
//
// The arithmetic is the language's (docs/libqpu.md, "Arithmetic"). Error bounds are in units in
// the last place (ulp) with the interpreter's rounding.
#ifndef QPU_KERNELS_H
#define QPU_KERNELS_H

#include "qpu/detail/export.h"
#include "qpu/shared_array.h"

namespace qpu {
namespace kernels {

typedef BusPointer<float> Floats;

// Elementwise functions, in place. Results are exact with the language's rounding, unless a bound
// is given. NaN stays NaN in relu, clamp, exp, sqrt, sigmoid and tanh; sums and products turn NaN
// into Inf.
QPU_API void add(Floats out, Floats a, Floats b, int n, int qpus = 0);
QPU_API void sub(Floats out, Floats a, Floats b, int n, int qpus = 0);
QPU_API void mul(Floats out, Floats a, Floats b, int n, int qpus = 0);
// a * b + c and factor * a + b. The product is rounded before the addition.
QPU_API void fma(Floats out, Floats a, Floats b, Floats c, int n, int qpus = 0);
QPU_API void axpy(Floats out, float factor, Floats a, Floats b, int n, int qpus = 0);
QPU_API void scale(Floats out, float factor, Floats a, int n, int qpus = 0);
QPU_API void relu(Floats out, Floats a, int n, int qpus = 0);
// min(max(a, low), high).
QPU_API void clamp(Floats out, Floats a, float low, float high, int n, int qpus = 0);
// Error up to 4 ulp; results below 1.7e-38 are 0.
QPU_API void exp(Floats out, Floats a, int n, int qpus = 0);
// Error up to 4 ulp; 0 for 0 and denormals, NaN for negative numbers.
QPU_API void sqrt(Floats out, Floats a, int n, int qpus = 0);
// Error up to 8 ulp.
QPU_API void sigmoid(Floats out, Floats a, int n, int qpus = 0);
QPU_API void tanh(Floats out, Floats a, int n, int qpus = 0);

// Reductions over n elements. Sums are compensated: |error| <= 4 ulp of the sum of the
// magnitudes. For dot and norm, the products' rounding errors are added to this bound.
QPU_API float sum(Floats a, int n, int qpus = 0);
QPU_API float dot(Floats a, Floats b, int n, int qpus = 0);
// The square root of the sum of the squares. Squares above 3.4e38 overflow.
QPU_API float norm(Floats a, int n, int qpus = 0);
// For n >= 1. Elements are ordered as in IEEE's totalOrder: -0 is less than 0 and a
// positive NaN is greater than Inf. argmax returns the first of equal elements.
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

// y = a x, where a has m rows and k columns.
QPU_API void matvec(Floats y, Matrix a, Floats x, int m, int k, int qpus = 0);
// c = alpha a b + beta c, where a is m x k and b is k x n. The column stride of c must be
// 1. If beta is 0, c is not read.
QPU_API void matmul(Matrix c, Matrix a, Matrix b, int m, int n, int k, float alpha = 1,
                    float beta = 0, int qpus = 0);

// Softmax of each row, in place. A row that contains NaN or +Inf, or only -Inf, becomes NaN.
// rowStride is the distance between rows in both the input and the output.
QPU_API void softmax(Floats out, Floats a, int rows, int columns, int rowStride, int qpus = 0);

// The geometry of a convolution or pooling over images [batch][channels][height][width].
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

// out[batch][outChannels][outHeight][outWidth]; weights[outChannels][channels / groups]
// [kernelHeight][kernelWidth]; bias[outChannels] or null.
QPU_API void conv2d(Floats out, Floats a, Floats weights, Floats bias, const Window& window,
                    int outChannels, int qpus = 0);
// The maximum under the window. Padding counts as -Inf; groups have no effect.
QPU_API void maxPool2d(Floats out, Floats a, const Window& window, int qpus = 0);

// (a - mean) / sqrt(variance + epsilon) * weight + bias per channel of
// [batch][channels][size], in place. A null weight means 1, a null bias means 0.
QPU_API void batchNorm(Floats out, Floats a, Floats mean, Floats variance, Floats weight,
                       Floats bias, float epsilon, int batch, int channels, int size,
                       int qpus = 0);

}  // namespace kernels
}  // namespace qpu

#endif
