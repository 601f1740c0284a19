// Kernels that process regions of planes: weighted sums, and greatest elements. The CPU computes
// tables that describe the regions. The tables are as large as a plane. This file does not depend
// on torch. The requirements in learning.h apply.
#ifndef TORCH_QPU_REGIONS_H
#define TORCH_QPU_REGIONS_H

#include <cstdint>
#include <vector>

namespace torch_qpu::learning {

// The regions of a plane. There is one region for each element in a plane of results.
struct Regions {
  std::vector<int> start;  // index of the first element, in row-major order
  std::vector<int> rows;
  std::vector<int> columns;
  int width = 0;  // width of the plane that contains the regions
  int size = 0;   // number of elements in this plane
};

// For each plane, sets out[i] to factors[i] * (the sum of weights[p] in[p] over region i).
void region_sums(float* out, const float* in, int planes, const Regions& of,
                 const std::vector<float>& weights, const std::vector<float>& factors, int qpus);

// Computes the index of the greatest element in region i. NaN is treated as greater than all other
// values. If the greatest value occurs several times, the result is the index of its first
// occurrence.
void region_places(std::int64_t* places, const float* in, int planes, const Regions& of, int qpus);

// Computes out[i] = in[places[i]] for planes of `size` results and `in_size` elements.
void at_places(float* out, const float* in, const std::int64_t* places, int planes, int size,
               int in_size, int qpus);

// Sets out[p] to the sum of gradient[i] over all i in region p for which places[i] is p.
void region_gradient(float* out, const float* gradient, const std::int64_t* places, int planes,
                     const Regions& of, int qpus);

}  // namespace torch_qpu::learning

#endif
