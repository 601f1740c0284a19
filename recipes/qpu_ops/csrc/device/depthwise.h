// Convolution of each channel with its own kernels, in a single launch. This file does not depend
// on torch. The requirements in learning.h apply.
#ifndef TORCH_QPU_DEPTHWISE_H
#define TORCH_QPU_DEPTHWISE_H

#include "learning.h"

namespace torch_qpu::learning {

// Images [batch][channels][height][width] and the windows on them. `window.planes` is not used.
// Each channel has `outputs` output channels.
struct Depthwise {
  Pooling window;
  int batch = 0;
  int channels = 0;
  int outputs = 1;
};

// The arrays have these shapes: out[batch][channels * outputs][out_height][out_width],
// weights[channels * outputs][kernel_height][kernel_width] and bias[channels * outputs]. `bias`
// can be null.
void depthwise(float* out, const float* in, const float* weights, const float* bias,
               const Depthwise& shape, int qpus);
// Computes the gradient of the weights. `shape.outputs` must be 1.
void depthwise_weights(float* out, const float* in, const float* gradient, const Depthwise& shape,
                       int qpus);

}  // namespace torch_qpu::learning

#endif
