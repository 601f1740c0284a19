// Kernels over regions of planes: weighted sums, and greatest elements. The CPU computes tables
// as large as a plane to describe the regions. Independent of torch. The requirements of
// learning.h apply.
#ifndef TORCH_QPU_REGIONS_H
#define TORCH_QPU_REGIONS_H

#include <cstdint>
#include <vector>

namespace torch_qpu::learning {

// A part of a plane, for each element of a plane of results.
struct Regions {
  std::vector<int> start;  // index of the first element, in row-major order
  std::vector<int> rows;
  std::vector<int> columns;
  int width = 0;  // of the plane that contains the regions
  int size = 0;   // the number of its elements
};

// out[i] = factors[i] * the sum over region i of weights[p] in[p], for each plane.
void region_sums(float* out, const float* in, int planes, const Regions& of,
                 const std::vector<float>& weights, const std::vector<float>& factors, int qpus);

// The index of the greatest element of region i, the first if several are equal or NaN.
void region_places(std::int64_t* places, const float* in, int planes, const Regions& of, int qpus);

// out[i] = in[places[i]], for planes of `size` results and `in_size` elements.
void at_places(float* out, const float* in, const std::int64_t* places, int planes, int size,
               int in_size, int qpus);

// out[p] = the sum of gradient[i] over region p where places[i] is p.
void region_gradient(float* out, const float* gradient, const std::int64_t* places, int planes,
                     const Regions& of, int qpus);

}  // namespace torch_qpu::learning

#endif
