// Convolution of each channel with its own kernels, in one launch. Independent of torch.
// The requirements of learning.h apply.
#ifndef TORCH_QPU_DEPTHWISE_H
#define TORCH_QPU_DEPTHWISE_H

#include "learning.h"

namespace torch_qpu::learning {

// Images [batch][channels][height][width] and the windows over them; `window.planes` is not
// used. Each channel has `outputs` output channels.
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
