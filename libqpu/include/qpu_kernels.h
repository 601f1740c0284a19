/* The C interface of the kernel library. The header qpu/kernels.h documents the functions with the
 * same names: what they compute, their valid ranges and their error bounds.
 *
 * A pointer is the CPU's address of an element in a qpu_buffer or SharedArray, or a bus address
 * cast to a pointer. `qpus` is 1..12, or 0 to let the library choose. All functions
 * return 0, or -1 on failure. After a failure, qpu_last_error() returns the error message. */
#ifndef QPU_KERNELS_C_H
#define QPU_KERNELS_C_H

#include "qpu.h"

#ifdef __cplusplus
extern "C" {
#endif

QPU_C_API int qpu_add(float *out, const float *a, const float *b, int n, int qpus);
QPU_C_API int qpu_sub(float *out, const float *a, const float *b, int n, int qpus);
QPU_C_API int qpu_mul(float *out, const float *a, const float *b, int n, int qpus);
QPU_C_API int qpu_fma(float *out, const float *a, const float *b, const float *c, int n, int qpus);
QPU_C_API int qpu_axpy(float *out, float factor, const float *a, const float *b, int n, int qpus);
QPU_C_API int qpu_scale(float *out, float factor, const float *a, int n, int qpus);
QPU_C_API int qpu_relu(float *out, const float *a, int n, int qpus);
QPU_C_API int qpu_clamp(float *out, const float *a, float low, float high, int n, int qpus);
QPU_C_API int qpu_exp(float *out, const float *a, int n, int qpus);
QPU_C_API int qpu_sqrt(float *out, const float *a, int n, int qpus);
QPU_C_API int qpu_sigmoid(float *out, const float *a, int n, int qpus);
QPU_C_API int qpu_tanh(float *out, const float *a, int n, int qpus);

QPU_C_API int qpu_sum(float *result, const float *a, int n, int qpus);
QPU_C_API int qpu_dot(float *result, const float *a, const float *b, int n, int qpus);
QPU_C_API int qpu_norm(float *result, const float *a, int n, int qpus);
QPU_C_API int qpu_max(float *result, const float *a, int n, int qpus);
QPU_C_API int qpu_argmax(int *result, const float *a, int n, int qpus);

/* Element (i, j) of a matrix is at data + i * row_stride + j * column_stride. */
struct qpu_matrix {
  float *data;
  int row_stride;
  int column_stride;
};
QPU_C_API int qpu_matvec(float *y, struct qpu_matrix a, const float *x, int m, int k, int qpus);
QPU_C_API int qpu_matmul(struct qpu_matrix c, struct qpu_matrix a, struct qpu_matrix b, int m,
                         int n, int k, float alpha, float beta, int qpus);
QPU_C_API int qpu_softmax(float *out, const float *a, int rows, int columns, int row_stride,
                          int qpus);

struct qpu_window {
  int batch, channels, height, width;
  int kernel_height, kernel_width;
  int stride_y, stride_x;
  int padding_y, padding_x;
  int dilation_y, dilation_x;
  int groups; /* for qpu_conv2d only; 0 means 1 */
};
QPU_C_API int qpu_conv2d(float *out, const float *a, const float *weights, const float *bias,
                         const struct qpu_window *window, int out_channels, int qpus);
QPU_C_API int qpu_max_pool2d(float *out, const float *a, const struct qpu_window *window,
                             int qpus);
QPU_C_API int qpu_batch_norm(float *out, const float *a, const float *mean, const float *variance,
                             const float *weight, const float *bias, float epsilon, int batch,
                             int channels, int size, int qpus);

#ifdef __cplusplus
}
#endif

#endif
