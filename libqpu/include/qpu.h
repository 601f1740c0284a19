/* The C interface of libqpu: version and backend, memory shared with the QPUs, and
 * programs in machine code. Every function can be called from any thread. Several
 * threads can run the same program at once. */
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

/* Name of the current backend, as in QPU_BACKEND. NULL if QPU_BACKEND
 * names an unknown backend, or one that does not work on this machine. */
QPU_C_API const char *qpu_backend_name(void);

/* One sentence: why this backend was selected or, if qpu_backend_name() is NULL, what
 * is wrong and which names are valid. Never NULL. Valid until this thread calls
 * qpu_backend_name() or qpu_backend_reason() again. */
QPU_C_API const char *qpu_backend_reason(void);

/* Error message of this thread's last failed call; "" if no call has failed. Valid
 * until the next call fails. */
QPU_C_API const char *qpu_last_error(void);

/* Name of the C++ class of that error, such as "ArgumentError"; "" if no call has failed. */
QPU_C_API const char *qpu_last_error_class(void);

/* Frees the result of a function whose documentation requires qpu_free(). NULL is allowed. */
QPU_C_API void qpu_free(void *memory);

/* The report that qpu-info prints: text, or one JSON object if `json` is not 0. `root`
 * is the directory that contains /proc, /dev and /boot. For "/" or NULL the report also
 * includes information read from the hardware. Free the result with qpu_free(). NULL on
 * failure. */
QPU_C_API char *qpu_machine_report(const char *root, int json);

/* --- memory ---------------------------------------------------------------- */

/* Memory shared by the CPU and the QPUs. If kernels run on the QPUs, this is GPU memory.
 * It is filled with zeros; `bytes` is rounded up to a multiple of 4. NULL on failure. */
typedef struct qpu_buffer qpu_buffer;
QPU_C_API qpu_buffer *qpu_buffer_new(size_t bytes);
QPU_C_API void qpu_buffer_delete(qpu_buffer *buffer);
QPU_C_API size_t qpu_buffer_bytes(const qpu_buffer *buffer);
/* The CPU's address, aligned to 64 bytes. On hardware the memory is uncached: read and
 * write words in order, or whole blocks with the two functions below. */
QPU_C_API void *qpu_buffer_data(const qpu_buffer *buffer);
/* The QPUs' address. */
QPU_C_API uint32_t qpu_buffer_address(const qpu_buffer *buffer);
/* Copy a block of words. `offset`, `bytes` and `data` must be multiples of 4. Return 0, or
 * -1 on failure. */
QPU_C_API int qpu_buffer_write(qpu_buffer *buffer, size_t offset, const void *data, size_t bytes);
QPU_C_API int qpu_buffer_read(const qpu_buffer *buffer, size_t offset, void *data, size_t bytes);

/* --- programs -------------------------------------------------------------- */

/* Machine code. It runs on the selected backend. If QPU_BACKEND is not set and there is
 * no VideoCore, it runs on the emulator, because the interpreter cannot run it. */
typedef struct qpu_program qpu_program;

/* Opens a kernel that Kernel::save() wrote, or a file of bare 8-byte instruction words in
 * little-endian order. NULL on failure. */
QPU_C_API qpu_program *qpu_program_open(const char *path);
QPU_C_API qpu_program *qpu_program_from_bytes(const void *data, size_t bytes, const char *name);
QPU_C_API qpu_program *qpu_program_from_words(const uint64_t *words, size_t count,
                                              const char *name);
QPU_C_API void qpu_program_delete(qpu_program *program);
/* Returns 0, or -1 on failure. */
QPU_C_API int qpu_program_save(const qpu_program *program, const char *path);

QPU_C_API const char *qpu_program_name(const qpu_program *program);
/* Number of instruction words. The words are valid as long as the program. */
QPU_C_API size_t qpu_program_words(const qpu_program *program, const uint64_t **words);
/* Number of arguments of a kernel; 0 for bare words. */
QPU_C_API size_t qpu_program_parameters(const qpu_program *program);
/* Whether the program uses the special function unit, whose results on the emulator and on
 * hardware differ in the last bits. */
QPU_C_API int qpu_program_uses_sfu(const qpu_program *program);

/* Runs a kernel to completion on 1..12 QPUs, with one word per parameter: an integer, the
 * bits of a float, or an address. Returns 0, or -1 on failure. */
QPU_C_API int qpu_program_run(qpu_program *program, int qpus, const uint32_t *arguments,
                              size_t count);
/* The same with explicit uniforms for each QPU: `count` words for QPU 0, then `count`
 * words for QPU 1, and so on. On vc4-mailbox the program must raise the host interrupt
 * once, after all QPUs have finished. Compiled kernels do that. */
QPU_C_API int qpu_program_run_raw(qpu_program *program, int qpus, const uint32_t *uniforms,
                                  size_t count);

/* If `on` is not 0, later runs on the emulator count executions per instruction. */
QPU_C_API void qpu_program_profile(qpu_program *program, int on);

/* Statistics of a run on the emulator, from its model of a board: not measured on
 * hardware. All values except clocks and seconds are sums over the QPUs. `seconds` is the
 * time of the kernel alone; the additional time for `launches` is given per backend. */
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
/* Statistics of the last run on the emulator. Returns 0, or -1 if there was none. */
QPU_C_API int qpu_program_cycles(const qpu_program *program, struct qpu_cycles *cycles);

/* The sum over all runs on the emulator that this thread started, including those of the
 * kernel library. Returns 0, or -1 if there was none. */
QPU_C_API int qpu_thread_cycles(struct qpu_cycles *cycles);

/* Parameters of the board model that the emulator uses (QPU_BOARD, QPU_MODEL), in the
 * format of a QPU_MODEL file, with ranges and sources as comments. Free the result with
 * qpu_free(). NULL on failure. */
QPU_C_API char *qpu_model_parameters(void);
/* One parameter, in its unit. Returns 0, or -1 on failure. */
QPU_C_API int qpu_model_parameter(const char *name, double *value);

/* Listing, with execution counts after a profiled run. Free the result with qpu_free().
 * NULL on failure. */
QPU_C_API char *qpu_program_listing(const qpu_program *program);

/* One line per word: its number, the word, and the text that qpu_assemble() translates to
 * this word. Free the result with qpu_free(). NULL on failure. */
QPU_C_API char *qpu_disassemble(const uint64_t *words, size_t count);
/* Translates lines of text, without the number and the word, to instruction words. '#'
 * starts a comment. Writes at most `room` words and returns the total number of words, or
 * -1 on failure. */
QPU_C_API long qpu_assemble(const char *text, uint64_t *words, size_t room);

#ifdef __cplusplus
}
#endif

#endif
