/* A compiled model: the functions that its library exports for C programs. The library requires only the C library.
 * Arrays are dense and start at a multiple of PITORCH_MODEL_ALIGNMENT bytes. A model uses one static work area, so
 * one thread at a time may run it. In an exported folder, this file begins with the numbers of inputs and outputs. */
#ifndef PITORCH_MODEL_H
#define PITORCH_MODEL_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PITORCH_MODEL_ALIGNMENT 64

/* The size in bytes of the parameters, of an input, and of an output; 0 if it is empty or the index is out of range. */
size_t pitorch_model_parameter_bytes(void);
size_t pitorch_model_input_bytes(int index);
size_t pitorch_model_output_bytes(int index);
/* Runs the model once. Returns 0, or -1 on failure. `seconds` is null, or receives the time of each operator. */
int pitorch_model_run(const void *parameters, const void *const *inputs, void *const *outputs, double *seconds);
/* The error message of the last failure. */
const char *pitorch_model_error(void);

#ifdef __cplusplus
}
#endif

#endif
