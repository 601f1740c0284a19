/* libqpu for C: which library this is, what runs its kernels, memory shared with
 * the QPUs, and programs in machine code. Functions may be called from any thread;
 * one program from several at once. */
#ifndef QPU_H
#define QPU_H

#include <stddef.h>
#include <stdint.h>

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
 * QPU_BACKEND names none, or one that does not work here. */
QPU_C_API const char *qpu_backend_name(void);

/* One sentence: why that backend, or, when qpu_backend_name() is NULL, what is
 * wrong and which names are valid. Never NULL; valid until this thread calls
 * qpu_backend_name() or qpu_backend_reason() again. */
QPU_C_API const char *qpu_backend_reason(void);

/* What went wrong in this thread's last call that failed; "" when none has. Valid
 * until the next one does. */
QPU_C_API const char *qpu_last_error(void);

/* Its class in C++: "ArgumentError", "BoundsError", ...; "" for none. */
QPU_C_API const char *qpu_last_error_class(void);

/* Frees what a function here says is to be freed. NULL is fine. */
QPU_C_API void qpu_free(void *memory);

/* What qpu-info prints: as text, or with `json` not 0 as one JSON object. `root`
 * is the directory to find /proc, /dev and /boot in; for "/" or NULL the hardware
 * is asked too. Free it with qpu_free(); NULL on failure. */
QPU_C_API char *qpu_machine_report(const char *root, int json);

/* --- memory ---------------------------------------------------------------- */

/* Memory that the CPU and the QPUs share: GPU memory where kernels run on the QPUs.
 * Zero-filled, `bytes` rounded up to words of 4. NULL on failure. */
typedef struct qpu_buffer qpu_buffer;
QPU_C_API qpu_buffer *qpu_buffer_new(size_t bytes);
QPU_C_API void qpu_buffer_delete(qpu_buffer *buffer);
QPU_C_API size_t qpu_buffer_bytes(const qpu_buffer *buffer);
/* For the CPU; aligned to 64 bytes. On hardware uncached: read and write words in
 * order, or whole blocks by the two functions below. */
QPU_C_API void *qpu_buffer_data(const qpu_buffer *buffer);
/* For the QPUs. */
QPU_C_API uint32_t qpu_buffer_address(const qpu_buffer *buffer);
/* Blocks of words: offset, bytes and `data` are multiples of 4. 0, or -1 on failure. */
QPU_C_API int qpu_buffer_write(qpu_buffer *buffer, size_t offset, const void *data, size_t bytes);
QPU_C_API int qpu_buffer_read(const qpu_buffer *buffer, size_t offset, void *data, size_t bytes);

/* --- programs -------------------------------------------------------------- */

/* Machine code. It runs on the backend in force, and on the emulator where
 * QPU_BACKEND is not set and there is no VideoCore: the interpreter cannot run it. */
typedef struct qpu_program qpu_program;

/* A kernel that Kernel::save() wrote, or else a file of bare words of 8 bytes, low
 * byte first. NULL on failure. */
QPU_C_API qpu_program *qpu_program_open(const char *path);
QPU_C_API qpu_program *qpu_program_from_bytes(const void *data, size_t bytes, const char *name);
QPU_C_API qpu_program *qpu_program_from_words(const uint64_t *words, size_t count,
                                              const char *name);
QPU_C_API void qpu_program_delete(qpu_program *program);
/* 0, or -1 on failure. */
QPU_C_API int qpu_program_save(const qpu_program *program, const char *path);

QPU_C_API const char *qpu_program_name(const qpu_program *program);
/* Number of words; they are valid as long as the program. */
QPU_C_API size_t qpu_program_words(const qpu_program *program, const uint64_t **words);
/* How many arguments a kernel takes; 0 for bare words. */
QPU_C_API size_t qpu_program_parameters(const qpu_program *program);
/* Whether the special function unit is used: its results differ between the
 * emulator and hardware in the last bits. */
QPU_C_API int qpu_program_uses_sfu(const qpu_program *program);

/* Runs a kernel to its end on 1..12 QPUs, with one word per parameter: an integer,
 * the bits of a float, or an address. 0, or -1 on failure. */
QPU_C_API int qpu_program_run(qpu_program *program, int qpus, const uint32_t *arguments,
                              size_t count);
/* The same with the uniforms of each QPU as they are: `count` words for QPU 0, then
 * as many for QPU 1, ... By vc4-mailbox the program must raise the host interrupt
 * once, after all QPUs have ended; kernels do. */
QPU_C_API int qpu_program_run_raw(qpu_program *program, int qpus, const uint32_t *uniforms,
                                  size_t count);

/* With `on` not 0 the next runs on the emulator count by instruction. */
QPU_C_API void qpu_program_profile(qpu_program *program, int on);

/* Of the last run on the emulator, by its model of a board: not measured on
 * hardware. Sums over the QPUs, but for clocks and seconds; `seconds` is the kernel
 * alone, and what `launches` take besides is told by backend. */
struct qpu_cycles {
  uint64_t instructions;
  uint64_t clocks;
  uint64_t stalled_on_tmu;
  uint64_t stalled_on_vpm;
  uint64_t stalled_on_other;
  uint64_t tmu_bytes;
  uint64_t memory_read_bytes;
  uint64_t memory_write_bytes;
  double seconds;
  const char *board;
  uint64_t launches;
  double registers_launch_seconds;
  double mailbox_launch_seconds;
};
/* 0, or -1 when there was no such run. */
QPU_C_API int qpu_program_cycles(const qpu_program *program, struct qpu_cycles *cycles);

/* The same, summed over all runs on the emulator that this thread started, the kernel
 * library's too. 0, or -1 when there was none. */
QPU_C_API int qpu_thread_cycles(struct qpu_cycles *cycles);

/* The parameters of the model of a board that the emulator uses (QPU_BOARD,
 * QPU_MODEL), as a file for QPU_MODEL, with their ranges and sources as comments.
 * Free it with qpu_free(); NULL on failure. */
QPU_C_API char *qpu_model_parameters(void);
/* One of them, in its unit. 0, or -1 on failure. */
QPU_C_API int qpu_model_parameter(const char *name, double *value);

/* Listing; after a profiled run with its counts. Free it with qpu_free(); NULL on
 * failure. */
QPU_C_API char *qpu_program_listing(const qpu_program *program);

/* One line per word: number, word, and text that qpu_assemble() makes that word of. Free
 * it with qpu_free(); NULL on failure. */
QPU_C_API char *qpu_disassemble(const uint64_t *words, size_t count);
/* Words of lines as above without number and word; '#' begins a comment. Writes at
 * most `room` of them and returns how many there are; -1 on failure. */
QPU_C_API long qpu_assemble(const char *text, uint64_t *words, size_t room);

#ifdef __cplusplus
}
#endif

#endif
