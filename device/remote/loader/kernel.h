/* What a library of a plain kernel exports, and the loader calls. A kernel in C++ on libqpu
 * includes kernel.hpp, which defines all of it. */
#ifndef PITORCH_KERNEL_H
#define PITORCH_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A dense array, the last dimension contiguous. `kind` is 'f', 'i' or 'u'; `bytes` are those
 * of one element. */
typedef struct {
  void *data;
  const int64_t *shape;
  int32_t dimensions;
  char kind;
  uint8_t bytes;
} pitorch_array;

#define PITORCH_EXPORT __attribute__((visibility("default")))

/* Memory that the kernel computes in, aligned to 64 bytes; null on failure. */
PITORCH_EXPORT void *pitorch_kernel_allocate(size_t bytes);
PITORCH_EXPORT void pitorch_kernel_release(void *memory);
/* Inputs, then the result. 0, or -1 on failure. */
PITORCH_EXPORT int pitorch_kernel_run(const pitorch_array *arrays, int32_t count);
/* Of the last failure. */
PITORCH_EXPORT const char *pitorch_kernel_error(void);
/* What runs the kernel, in a line. */
PITORCH_EXPORT const char *pitorch_kernel_backend(void);
/* What the last run takes on a board by an emulator's model of it; negative where there is no
 * model. */
PITORCH_EXPORT double pitorch_kernel_model_seconds(void);

#ifdef __cplusplus
}
#endif

#endif
