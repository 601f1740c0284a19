/* The C interface of libqpu: the library's version and backend, memory that the CPU shares with
 * the QPUs, and programs in machine code. Every function can be called from any thread. Several
 * threads can run the same program at the same time. */
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

/* Returns the version of libqpu.so as "major.minor.patch". */
QPU_C_API const char *qpu_version(void);

/* Returns the name of the current backend in the form that QPU_BACKEND accepts. Returns NULL if
 * QPU_BACKEND names an unknown backend or a backend that does not work on this machine. */
QPU_C_API const char *qpu_backend_name(void);

/* Returns a sentence that says why the current backend was selected. If qpu_backend_name() returns
 * NULL, the sentence says what is wrong and which names are valid. The result is never NULL, and it
 * is valid until this thread calls qpu_backend_name() or qpu_backend_reason() again. */
QPU_C_API const char *qpu_backend_reason(void);

/* Returns the error message of this thread's last failed call, or "" if no call has failed. The
 * result is valid until the next call fails. */
QPU_C_API const char *qpu_last_error(void);

/* Returns the name of the C++ class of the error that qpu_last_error() describes, such as
 * "ArgumentError", or "" if no call has failed. */
QPU_C_API const char *qpu_last_error_class(void);

/* Frees the result of a function whose documentation requires qpu_free(). NULL is allowed. */
QPU_C_API void qpu_free(void *memory);

/* Returns the report that qpu-info prints, as text if `json` is 0, or as a JSON object. `root`
 * is the directory that contains /proc, /dev and /boot. If `root` is "/" or NULL, the report also
 * includes information that is read from the hardware. Free the result with qpu_free(). Returns
 * NULL on failure. */
QPU_C_API char *qpu_machine_report(const char *root, int json);

/* --- memory ---------------------------------------------------------------- */

/* Allocates memory that the CPU and the QPUs share. If kernels run on the QPUs, this is GPU
 * memory. The memory is filled with zeros, and `bytes` is rounded up to a multiple of 4. Returns
 * NULL on failure. */
typedef struct qpu_buffer qpu_buffer;
QPU_C_API qpu_buffer *qpu_buffer_new(size_t bytes);
QPU_C_API void qpu_buffer_delete(qpu_buffer *buffer);
QPU_C_API size_t qpu_buffer_bytes(const qpu_buffer *buffer);
/* Returns the address at which the CPU accesses the buffer. The address is a multiple of 64. On
 * hardware, the memory is uncached: access words in ascending order, or copy whole blocks with the
 * two copy functions below. */
QPU_C_API void *qpu_buffer_data(const qpu_buffer *buffer);
/* Returns the bus address at which the QPUs access the buffer. */
QPU_C_API uint32_t qpu_buffer_address(const qpu_buffer *buffer);
/* Copy a block of words to or from the buffer. `offset`, `bytes` and `data` must be multiples of
 * 4. Both functions return 0, or -1 on failure. */
QPU_C_API int qpu_buffer_write(qpu_buffer *buffer, size_t offset, const void *data, size_t bytes);
QPU_C_API int qpu_buffer_read(const qpu_buffer *buffer, size_t offset, void *data, size_t bytes);

/* --- programs -------------------------------------------------------------- */

/* A program in machine code. Programs run on the selected backend. If QPU_BACKEND is not set and
 * the machine has no VideoCore, the program runs on the emulator, because the interpreter cannot
 * run machine code. */
typedef struct qpu_program qpu_program;

/* Opens a kernel that Kernel::save() wrote, or a file that contains only 8-byte instruction words
 * in little-endian order. Returns NULL on failure. */
QPU_C_API qpu_program *qpu_program_open(const char *path);
QPU_C_API qpu_program *qpu_program_from_bytes(const void *data, size_t bytes, const char *name);
QPU_C_API qpu_program *qpu_program_from_words(const uint64_t *words, size_t count,
                                              const char *name);
QPU_C_API void qpu_program_delete(qpu_program *program);
/* Writes the program to a file. Returns 0, or -1 on failure. */
QPU_C_API int qpu_program_save(const qpu_program *program, const char *path);

QPU_C_API const char *qpu_program_name(const qpu_program *program);
/* Returns the number of instruction words. The words are valid until the program is deleted. */
QPU_C_API size_t qpu_program_words(const qpu_program *program, const uint64_t **words);
/* Returns the number of arguments that the kernel takes, or 0 for a file of instruction words. */
QPU_C_API size_t qpu_program_parameters(const qpu_program *program);
/* Returns a nonzero value if the program uses the special function unit. The emulator's results
 * for this unit differ from the hardware's in the last bits. */
QPU_C_API int qpu_program_uses_sfu(const qpu_program *program);

/* Runs a kernel to completion on `qpus` (1..12) QPUs. `arguments` contains one word per
 * parameter: an integer, the bits of a float, or an address. Returns 0, or -1 on failure. */
QPU_C_API int qpu_program_run(qpu_program *program, int qpus, const uint32_t *arguments,
                              size_t count);
/* Runs a program as qpu_program_run() does, but with separate uniforms for each QPU: `count` words
 * for QPU 0, then `count` words for QPU 1, and so on. On vc4-mailbox the program must raise the
 * host interrupt once, after all QPUs have finished. Compiled kernels meet this requirement. */
QPU_C_API int qpu_program_run_raw(qpu_program *program, int qpus, const uint32_t *uniforms,
                                  size_t count);

/* If `on` is not 0, later runs on the emulator count how often each instruction is executed. */
QPU_C_API void qpu_program_profile(qpu_program *program, int on);

/* Statistics of a run on the emulator. The statistics come from the emulator's model of a board and
 * were not measured on hardware. The members up to `memory_write_bytes`, except `clocks`, are sums
 * over the QPUs. `seconds` is the time that the kernel alone takes. The last two members are the
 * additional times that `launches` launches take on vc4-registers and on vc4-mailbox. */
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
/* Writes the statistics of the program's last run on the emulator to `cycles`. Returns 0, or -1
 * if the program has not run on the emulator. */
QPU_C_API int qpu_program_cycles(const qpu_program *program, struct qpu_cycles *cycles);

/* Writes the sum of the statistics of all runs on the emulator that this thread started,
 * including runs by the kernel library. Returns 0, or -1 if there was no run. */
QPU_C_API int qpu_thread_cycles(struct qpu_cycles *cycles);

/* Returns the parameters of the board model that the emulator uses (see QPU_BOARD and QPU_MODEL)
 * in the format of a QPU_MODEL file. Comments in the text give each parameter's range and source.
 * Free the result with qpu_free(). Returns NULL on failure. */
QPU_C_API char *qpu_model_parameters(void);
/* Writes the value of one parameter, in the parameter's unit, to `value`. Returns 0, or -1 on
 * failure. */
QPU_C_API int qpu_model_parameter(const char *name, double *value);

/* Returns a listing of the program. After a profiled run it includes execution counts. Free the
 * result with qpu_free(). Returns NULL on failure. */
QPU_C_API char *qpu_program_listing(const qpu_program *program);

/* Returns one line per instruction word. Each line contains the word's number, the word itself,
 * and the text that qpu_assemble() assembles to this word. Free the result with qpu_free().
 * Returns NULL on failure. */
QPU_C_API char *qpu_disassemble(const uint64_t *words, size_t count);
/* Assembles text to instruction words. Each line of the text is one instruction, without the
 * number and the word that qpu_disassemble() prints; '#' starts a comment. Writes at most `room`
 * words. Returns the total number of words, or -1 on failure. */
QPU_C_API long qpu_assemble(const char *text, uint64_t *words, size_t room);

#ifdef __cplusplus
}
#endif

#endif
