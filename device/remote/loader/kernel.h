/* The functions that a plain kernel library exports and that the loader calls. A C++ kernel with
  * libqpu includes kernel.hpp, which defines all of them. */
#ifndef PITORCH_KERNEL_H
#define PITORCH_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A dense array; the last dimension is contiguous. `kind` is 'f', 'i' or 'u'; `bytes` is the
  * size of one element. */
typedef struct {
  void *data;
  const int64_t *shape;
  int32_t dimensions;
  char kind;
  uint8_t bytes;
} pitorch_array;

#define PITORCH_EXPORT __attribute__((visibility("default")))

/* Memory for the kernel's arrays, aligned to 64 bytes; null on failure. */
PITORCH_EXPORT void *pitorch_kernel_allocate(size_t bytes);
PITORCH_EXPORT void pitorch_kernel_release(void *memory);
/* Runs the kernel. The arrays are the inputs, then the result. Returns 0, or -1 on failure. */
PITORCH_EXPORT int pitorch_kernel_run(const pitorch_array *arrays, int32_t count);
/* The error message of the last failure. */
PITORCH_EXPORT const char *pitorch_kernel_error(void);
/* A line that describes the device or emulator that runs the kernel. */
PITORCH_EXPORT const char *pitorch_kernel_backend(void);
/* The duration of the last run on a board according to an emulator's model; negative if there
  * is no model. */
PITORCH_EXPORT double pitorch_kernel_model_seconds(void);

#ifdef __cplusplus
}
#endif

#endif
