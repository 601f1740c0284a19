/* libqpu for C: which library this is and what runs its kernels. */
#ifndef QPU_H
#define QPU_H

#if defined(__GNUC__)
#define QPU_C_API __attribute__((visibility("default")))
#else
#define QPU_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Version of libqpu.so, "major.minor.patch". */
QPU_C_API const char *qpu_version(void);

/* Name of the backend that runs kernels now, as QPU_BACKEND takes it; NULL when
 * QPU_BACKEND names none that this build has. */
QPU_C_API const char *qpu_backend_name(void);

/* One sentence: why that backend, or, when qpu_backend_name() is NULL, what is
 * wrong and which names are valid. Never NULL; valid until this thread calls
 * qpu_backend_name() or qpu_backend_reason() again. */
QPU_C_API const char *qpu_backend_reason(void);

/* What went wrong in this thread's last call that failed; "" when none has. Valid
 * until the next one does. */
QPU_C_API const char *qpu_last_error(void);

/* Frees what a function here says is to be freed. NULL is fine. */
QPU_C_API void qpu_free(void *memory);

/* What qpu-info prints: as text, or with `json` not 0 as one JSON object. `root`
 * is the directory to find /proc, /dev and /boot in; for "/" or NULL the hardware
 * is asked too. Free it with qpu_free(); NULL on failure. */
QPU_C_API char *qpu_machine_report(const char *root, int json);

#ifdef __cplusplus
}
#endif

#endif
