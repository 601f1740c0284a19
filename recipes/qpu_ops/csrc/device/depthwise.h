// Convolution of each channel by kernels of its own, in one launch. Nothing of torch here.
// Conditions as in learning.h.
#ifndef TORCH_QPU_DEPTHWISE_H
#define TORCH_QPU_DEPTHWISE_H

#include "learning.h"

namespace torch_qpu::learning {

// Images [batch][channels][height][width] under windows; of them `window` tells all but
// `planes`. Each channel has `outputs` output channels.
struct Depthwise {
  Pooling window;
  int batch = 0;
  int channels = 0;
  int outputs = 1;
};

// out[batch][channels * outputs][out_height][out_width]; weights[channels * outputs]
// [kernel_height][kernel_width]; bias[channels * outputs] or null.
void depthwise(float* out, const float* in, const float* weights, const float* bias,
               const Depthwise& shape, int qpus);
// The gradient of the weights; `outputs` is 1.
void depthwise_weights(float* out, const float* in, const float* gradient, const Depthwise& shape,
                       int qpus);

}  // namespace torch_qpu::learning

#endif
