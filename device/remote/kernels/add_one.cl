// Adds 1 to each element.
__kernel void add_one(__global const float *in, __global float *out) {
  const int i = get_global_id(0);
  out[i] = in[i] + 1.0f;
}
